"""Tests reading and writing of files of rows."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.batch import files
from nanovllm.batch.files import BadRow, JsonLines, LineFile, open_source, to_line


def test_reads_rows_from_any_start(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n[2]\n{oops\n\xff\n  \n{"a": 3}')
    source = JsonLines(path)
    assert source.num_rows == 5
    rows = list(source.rows(0))
    assert [row for row in rows if isinstance(row, dict)] == [{"a": 1}, {"a": 3}]
    reasons = [row.reason for row in rows if isinstance(row, BadRow)]
    assert [reason.split(" must")[0].split(" is")[0] for reason in reasons] == [
        "line 3", "line 4", "line 5",
    ]  # fmt: skip
    for start in range(6):
        assert list(source.rows(start)) == rows[start:]


def test_nested_json_beyond_all_bounds_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 200_000 + "\n")
    (row,) = JsonLines(path).rows(0)
    assert isinstance(row, BadRow)


@pytest.mark.parametrize("name", ["rows.csv", "rows", "rows.jsonl.gz"])
def test_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"must end in one of \.jsonl"):
        open_source(tmp_path / name)


def test_missing_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        open_source(tmp_path / "rows.jsonl")


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists)))
def test_a_line_reads_back_as_its_row(row: dict[str, Any]) -> None:
    line = to_line(row)
    assert line.count(b"\n") == 1
    assert json.loads(line) == row


def test_half_a_surrogate_pair_can_be_written() -> None:
    assert json.loads(to_line({"text": "x \ud83d"})) == {"text": "x \ud83d"}


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_half_a_line_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(files, "READ_BYTES", piece)
    for whole in (b"", b"a\n", b"a\nbb\n"):
        path = tmp_path / "lines"
        path.write_bytes(whole + b"half")
        lines = LineFile(path)
        assert lines.num_lines == whole.count(b"\n")
        lines.append([b"c\n", b"d\n"])
        assert lines.num_lines == whole.count(b"\n") + 2
        lines.close()
        assert path.read_bytes() == whole + b"c\nd\n"


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineFile(tmp_path / "lines")
    lines.append([b"first\n"])
    pwrite, calls = os.pwrite, 0

    def nearly_full(file: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, bytes(data[:5]), offset)

    monkeypatch.setattr(os, "pwrite", nearly_full)
    with pytest.raises(OSError, match="No space left"):
        lines.append([b"second\n", b"third\n"])
    assert (tmp_path / "lines").read_bytes() == b"first\n"
    assert lines.num_lines == 1
    monkeypatch.undo()
    lines.append([b"second\n"])
    assert (tmp_path / "lines").read_bytes() == b"first\nsecond\n"
