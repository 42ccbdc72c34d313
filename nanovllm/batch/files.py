"""Files of rows: JSON Lines, read as a stream and appended to so that a kill loses nothing."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]
JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
READ_BYTES = 1 << 24
ROWS_PER_MARK = 4096


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read."""

    reason: str


class Source(Protocol):
    """An input file."""

    num_rows: int

    def rows(self, start: int) -> Iterator[Row | BadRow]:
        """Yields the rows from number `start` on."""
        ...


def is_parquet(path: Path) -> bool:
    """Tells the format by the suffix; raises `ValueError` if that is none of the known ones."""
    suffix = path.suffix.lower()
    if suffix != ".parquet" and suffix not in JSONL_SUFFIXES:
        known = ", ".join((*JSONL_SUFFIXES, ".parquet"))
        raise ValueError(f"{path} must end in one of {known}")
    return suffix == ".parquet"


def open_source(path: Path) -> Source:
    """Opens an input file; raises `ValueError` if there is none, or none of a known format."""
    is_columnar = is_parquet(path)
    if not path.is_file():
        raise ValueError(f"input file {path} does not exist")
    if not is_columnar:
        return JsonLines(path)
    from nanovllm.batch.parquet import ParquetRows

    return ParquetRows(path)


class JsonLines:
    """A file with a JSON object in each line. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Where every so many rows begin: the offset in the file and the number of the line.
        self._marks: list[tuple[int, int]] = []
        self.num_rows = offset = 0
        with path.open("rb", buffering=READ_BYTES) as file:
            for line_number, line in enumerate(file, 1):
                if not line.isspace():
                    if self.num_rows % ROWS_PER_MARK == 0:
                        self._marks.append((offset, line_number))
                    self.num_rows += 1
                offset += len(line)

    def rows(self, start: int) -> Iterator[Row | BadRow]:
        mark, num_skipped = divmod(start, ROWS_PER_MARK)
        if start >= self.num_rows:
            return
        offset, first = self._marks[mark]
        with self._path.open("rb", buffering=READ_BYTES) as file:
            file.seek(offset)
            numbered = ((n, line) for n, line in enumerate(file, first) if not line.isspace())
            for line_number, line in islice(numbered, num_skipped, None):
                yield _parsed(line, line_number)


def _parsed(line: bytes, line_number: int) -> Row | BadRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8
        return BadRow(f"line {line_number} is no JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(f"line {line_number} must be a JSON object, got {str(row)[:80]}")
    return row


def to_line(row: Row) -> bytes:
    """Returns a row as a line of JSON; what JSON lacks becomes text."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can express
        return json.dumps(row, default=str).encode() + b"\n"


class LineFile:
    """Appends lines to a file that holds whole lines only, whatever ends the process.

    num_lines: lines in the file, those from before among them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.num_lines, self._size = self._whole_lines()
        os.ftruncate(self._file, self._size)  # a killed write may have left half a line

    def append(self, lines: Iterable[bytes]) -> None:
        """Appends lines, each with its end; after an `OSError` none of these lines is there."""
        data = list(lines)
        rest = memoryview(b"".join(data))
        try:
            while rest:
                count = os.pwrite(self._file, rest, os.fstat(self._file).st_size)
                rest = rest[count:]
        except BaseException:
            os.ftruncate(self._file, self._size)
            raise
        self._size = os.fstat(self._file).st_size
        self.num_lines += len(data)

    def close(self) -> None:
        os.close(self._file)

    def _whole_lines(self) -> tuple[int, int]:
        """Returns how many lines the file has, and where the last of them ends."""
        num_lines = end = position = 0
        while piece := os.pread(self._file, READ_BYTES, position):
            num_lines += piece.count(b"\n")
            if b"\n" in piece:
                end = position + piece.rindex(b"\n") + 1
            position += len(piece)
        return num_lines, end
