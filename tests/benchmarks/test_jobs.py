"""Tests the comparison of a job over a file with `generate`."""

import re
from pathlib import Path

import pytest

from benchmarks import jobs


def test_both_ways_serve_all_rows(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--job few-shot --scale 0.02 --repeats 2 --max-num-seqs 8 --device cpu"
    jobs.main(["--model", str(tiny_qwen3), *options.split()])
    head, *rates, ratio = capsys.readouterr().out.splitlines()
    assert re.match(r"few-shot: 20 rows, \d+ output tokens, ", head)
    assert [re.fullmatch(r"(\w+): \d+ tok/s", line)[1] for line in rates] == [  # type: ignore[index]
        "generate", "job", "generate", "job",
    ]  # fmt: skip
    assert re.fullmatch(r"job / generate: \d+\.\d{3}", ratio)
