"""Runs a job: reads rows, keeps the engine full, and writes results in the order of the rows."""

import fcntl
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from nanovllm.batch.engine_processes import EngineProcesses, gpus_for_engines
from nanovllm.batch.engines import Engine, LocalEngine
from nanovllm.batch.files import LineFile, Source, is_parquet, open_source, to_line
from nanovllm.batch.formats import format_of
from nanovllm.batch.options import Options
from nanovllm.batch.serving import ServedRow, serve

MAX_ROWS_WAITING = 16384  # that are served and not yet written


class TooManyErrorsError(RuntimeError):
    """More rows have failed than `max_errors` allows."""


@dataclass(slots=True)
class Summary:
    """What a run of a job has done; `num_before` rows had been done by earlier runs."""

    num_before: int = 0
    num_rows: int = 0
    num_errors: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        before = f" ({self.num_before} were there before)" if self.num_before else ""
        rate = self.num_tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.num_rows} rows{before}, {self.num_errors} errors, "
            f"{self.num_prompt_tokens} prompt tokens, {self.num_tokens} tokens, "
            f"{self.seconds:.1f} s, {rate:.0f} tok/s"
        )


def run(options: Options) -> Summary:
    """Does what is left of a job.

    Raises `ValueError` if it cannot be started, `TooManyErrorsError`, and the `OSError` of reading
    and writing.
    """
    source = open_source(options.input)
    to_parquet = is_parquet(options.output)
    if options.input.resolve() == options.output.resolve():
        raise ValueError(f"input and output are the same file, {options.input}")
    lines_path = _with_suffix(options.output, ".results.jsonl") if to_parquet else options.output
    with _claimed(options, lines_path) as is_complete:
        if is_complete:
            return Summary(num_before=source.num_rows)
        lines = LineFile(lines_path)
        try:
            summary = _serve(options, source, lines)
        finally:
            lines.close()
        if to_parquet:
            from nanovllm.batch.parquet import write_parquet

            write_parquet(source, lines_path, options.output)
            lines_path.unlink()
    return summary


@contextmanager
def _claimed(options: Options, lines: Path) -> Iterator[bool]:
    """Holds the record of the job beside its output, which says what it is until it is complete.

    Yields whether the output is complete already. Raises `ValueError` if another process writes it,
    or if it belongs to another job.
    """
    record = _with_suffix(options.output, ".job")
    if _has_content(options.output) and not record.exists() and not options.overwrite:
        yield _is_complete(options)
        return
    with open(record, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is writing {options.output}") from None
        file.seek(0)
        before = file.read()
        if options.overwrite:
            for path in (options.output, lines):
                path.unlink(missing_ok=True)
        if before and _has_content(lines):
            _check_same(options, json.loads(before))
        else:  # not written again: on a full disk that could lose it
            file.truncate(0)
            json.dump(options.identity, file)
            file.flush()
        yield False
        record.unlink()


def _is_complete(options: Options) -> bool:
    """Raises `ValueError` unless the output, which has no record beside it, has all rows."""
    num_rows, num_done = (open_source(p).num_rows for p in (options.input, options.output))
    if num_rows != num_done:
        raise ValueError(
            f"{options.output} exists and has {num_done} rows, where the input has {num_rows}; "
            "it is not the beginning of this job. Remove it, or pass --overwrite"
        )
    return True


def _check_same(options: Options, before: dict[str, Any]) -> None:
    for name, value in options.identity.items():
        if before.get(name) != value:
            raise ValueError(
                f"{options.output} was begun with {name}={before.get(name)!r}, not {value!r}; go "
                "on with that, or pass --overwrite to start afresh"
            )


def _serve(options: Options, source: Source, lines: LineFile) -> Summary:
    """Serves the rows that have no line yet."""
    summary = Summary(num_before=lines.num_lines)
    if lines.num_lines >= source.num_rows:
        return summary
    form = format_of(next(source.rows(0)), options)
    with tqdm(
        total=source.num_rows,
        initial=lines.num_lines,
        unit="row",
        desc="Rows",
        disable=not options.progress,
    ) as bar:
        job = Job(lines, summary, options.max_errors, bar)
        if options.ray:
            from nanovllm.batch.on_ray import serve_on_ray

            job.write(serve_on_ray(source, lines.num_lines, options))
            return summary
        rows = enumerate(source.rows(lines.num_lines), lines.num_lines)
        with _engine(options) as engine:
            job.write(serve(rows, form, engine, job.has_room))
    return summary


@contextmanager
def _engine(options: Options) -> Iterator[Engine]:
    size = options.engine.get("tensor_parallel_size", 1)
    engine: Engine
    if options.data_parallel_size == 1:
        engine = LocalEngine(options.engine)
    else:
        gpus = gpus_for_engines(options.data_parallel_size, size)
        engine = EngineProcesses(options.engine, gpus)
    try:
        yield engine
    finally:
        engine.exit()


class Job:
    """Writes the results of a job in the order of its rows."""

    def __init__(self, lines: LineFile, summary: Summary, max_errors: int | None, bar: Any) -> None:
        self._lines = lines
        self._summary = summary
        self._max_errors = max_errors
        self._bar = bar
        self._waiting: dict[int, bytes] = {}  # lines that wait for an earlier one

    def has_room(self) -> bool:
        """Whether more rows should be read: one that takes long holds up those behind it."""
        return len(self._waiting) < MAX_ROWS_WAITING

    def write(self, results: Iterable[ServedRow]) -> None:
        """Writes all `results`; raises `TooManyErrorsError` if too many of them are errors."""
        start = perf_counter()
        for served in results:
            self._summary.seconds = perf_counter() - start
            self._count(served)
            self._waiting[served.index] = to_line(served.row)
            ready: list[bytes] = []
            while (line := self._waiting.pop(self._lines.num_lines + len(ready), None)) is not None:
                ready.append(line)
            if ready:
                self._lines.append(ready)
                self._summary.num_rows += len(ready)
                self._show(len(ready))
            if self._max_errors is not None and self._summary.num_errors > self._max_errors:
                raise TooManyErrorsError(
                    f"{self._summary.num_errors} rows have failed, more than "
                    f"max_errors={self._max_errors}"
                )

    def _count(self, served: ServedRow) -> None:
        self._summary.num_errors += served.is_error
        self._summary.num_prompt_tokens += served.num_prompt_tokens
        self._summary.num_tokens += served.num_tokens

    def _show(self, num_rows: int) -> None:
        self._bar.update(num_rows)
        seconds = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._summary.num_tokens / seconds:.0f} tok/s", False)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
