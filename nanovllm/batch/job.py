"""Runs a job: reads rows, keeps the engine full, and writes results in the order of the rows."""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from nanovllm.batch.engines import Engine, EngineProcesses, LocalEngine, gpus_for_engines
from nanovllm.batch.files import BadRow, LineFile, Row, Source, is_parquet, open_source, to_line
from nanovllm.batch.openai_format import OpenAIRows, is_openai
from nanovllm.batch.options import Options
from nanovllm.batch.requests import Format, PlainRows, SamplingDefaults
from nanovllm.engine.tokenizer import load_tokenizer

MAX_ROWS_AHEAD = 16384  # that are read and not yet written: one long row holds the others up


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
            summary = _serve(options, source, lines, whole_row=not to_parquet)
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
        elif before and _has_content(lines):
            _check_same(options, json.loads(before))
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


def _serve(options: Options, source: Source, lines: LineFile, whole_row: bool) -> Summary:
    """Serves the rows that have no line yet."""
    summary = Summary(num_before=lines.num_lines)
    if lines.num_lines >= source.num_rows:
        return summary
    first = next(source.rows(0))
    defaults = SamplingDefaults(options.sampling, options.seed)
    plain = PlainRows(
        defaults,
        prompt_column=options.prompt_column,
        messages_column=options.messages_column,
        result_prefix=options.result_prefix,
        whole_row=whole_row,
    )
    is_plain = isinstance(first, BadRow) or not is_openai(first)
    if is_plain and isinstance(first, dict):
        plain.check(first)
    engine = _engine(options)
    try:
        form = plain if is_plain else OpenAIRows(defaults, _token_text(options.engine["model"]))
        with tqdm(
            total=source.num_rows,
            initial=lines.num_lines,
            unit="row",
            desc="Rows",
            disable=not options.progress,
        ) as bar:
            Job(source, lines, form, engine, summary, options.max_errors, bar).run()
    finally:
        engine.exit()
    return summary


def _token_text(model: str) -> Callable[[int], str]:
    """Returns what makes text of a token id, with a tokenizer that is loaded when it is needed."""
    tokenizer = cache(lambda: load_tokenizer(model))

    def token_text(token_id: int) -> str:
        return str(token_id) if (t := tokenizer()) is None else str(t.decode([token_id]))

    return token_text


def _engine(options: Options) -> Engine:
    size = options.engine.get("tensor_parallel_size", 1)
    if options.data_parallel_size == 1:
        return LocalEngine(options.engine)
    return EngineProcesses(options.engine, gpus_for_engines(options.data_parallel_size, size))


class Job:
    """The rows of a job on their way from the source through the engine to the lines."""

    def __init__(
        self,
        source: Source,
        lines: LineFile,
        form: Format,
        engine: Engine,
        summary: Summary,
        max_errors: int | None,
        bar: Any,
    ) -> None:
        self._rows = enumerate(source.rows(lines.num_lines), lines.num_lines)
        self._lines = lines
        self._form = form
        self._engine = engine
        self._summary = summary
        self._max_errors = max_errors
        self._bar = bar
        self._reading: dict[int, Row] = {}  # those that the engine has
        self._ended: dict[int, bytes] = {}  # lines that wait for an earlier one
        self._is_read = False

    def run(self) -> None:
        start = perf_counter()
        try:
            while not self._is_read or self._reading or self._ended:
                self._take_rows()
                if self._engine.num_pending:
                    self._take_answers()
                self._write()
        finally:
            self._summary.seconds = perf_counter() - start

    def _take_rows(self) -> None:
        """Reads as many rows as the engine has room for."""
        room = self._engine.room()
        while room > 0 and len(self._reading) + len(self._ended) < MAX_ROWS_AHEAD:
            index, row = next(self._rows, (-1, {}))
            if index < 0:
                self._is_read = True
                return
            room -= 1
            if isinstance(row, BadRow):
                self._fail(index, row, row.reason)
                continue
            try:
                request = self._form.request(index, row)
            except (TypeError, ValueError) as error:
                self._fail(index, row, str(error))
                continue
            self._reading[index] = row
            self._engine.submit(index, request)

    def _take_answers(self) -> None:
        for index, answer in self._engine.poll():
            row = self._reading.pop(index)
            if isinstance(answer, str):
                self._fail(index, row, answer)
                continue
            self._summary.num_prompt_tokens += len(answer["prompt_token_ids"])
            samples: list[Any] = answer.get("outputs", [answer])
            self._summary.num_tokens += sum(len(sample["token_ids"]) for sample in samples)
            self._ended[index] = to_line(self._form.result(index, row, answer))

    def _fail(self, index: int, row: Row | BadRow, reason: str) -> None:
        self._ended[index] = to_line(self._form.error(index, row, reason))
        self._summary.num_errors += 1

    def _write(self) -> None:
        """Writes the lines whose turn it is."""
        ready: list[bytes] = []
        while (line := self._ended.pop(self._lines.num_lines + len(ready), None)) is not None:
            ready.append(line)
        if ready:
            self._lines.append(ready)
            self._summary.num_rows += len(ready)
            self._bar.update(len(ready))
            seconds = self._bar.format_dict["elapsed"] or 1e-9
            self._bar.set_postfix_str(f"{self._summary.num_tokens / seconds:.0f} tok/s", False)
        if self._max_errors is not None and self._summary.num_errors > self._max_errors:
            raise TooManyErrorsError(
                f"{self._summary.num_errors} rows have failed, more than "
                f"max_errors={self._max_errors}"
            )


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
