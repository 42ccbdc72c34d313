"""Serves the rows of a job with Ray Data. The files must be where all nodes see them."""

import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from nanovllm.batch.engines import LocalEngine
from nanovllm.batch.files import BadRow, Row, Source, open_source, to_line
from nanovllm.batch.formats import format_of
from nanovllm.batch.options import Options
from nanovllm.batch.serving import ServedRow, serve

try:
    import pyarrow as pa
    import ray
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata
except ImportError as error:
    raise ValueError("--ray needs Ray Data: pip install 'nanovllm[ray]'") from error

from nanovllm.ray import pool, resources

COUNTS = ("is_error", "num_prompt_tokens", "num_tokens")


def serve_on_ray(source: Source, start: int, options: Options) -> Iterator[ServedRow]:
    """Serves the rows from number `start` on and yields them batch by batch.

    Prints Ray's statistics of the job in the end, if its progress is shown.
    """
    if not ray.is_initialized():
        ray.init()  # joins the cluster that RAY_ADDRESS or `ray start` names, or starts one
    results = ray.data.read_datasource(
        _RowRanges(source, start, options.ray_batch_size, options),
        num_cpus=0,  # else engines on all CPUs would wait for rows for ever
    ).map_batches(
        _LineCompletions,
        fn_constructor_args=(options, next(source.rows(0))),
        batch_size=options.ray_batch_size,
        batch_format="pyarrow",
        compute=pool(options.ray_concurrency),
        **resources(options.engine),
    )
    # In any other order, all that waits for a slow batch would have to wait in this process.
    results.context.execution_options.preserve_order = True
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        for row in batch.to_pylist():
            counts = {name: row[name] for name in COUNTS}
            yield ServedRow(row["index"], json.loads(row["line"]), **counts)
    if options.progress:
        print(results.stats(), file=sys.stderr)


class _RowRanges(Datasource):  # type: ignore[misc]
    """The rows of a file, so many for each task: a table of their numbers and lines."""

    def __init__(self, source: Source, start: int, size: int, options: Options) -> None:
        super().__init__()
        self._starts = range(start, source.num_rows, size)
        self._options = options

    def estimate_inmemory_data_size(self) -> int:
        return self._options.input.stat().st_size

    def get_read_tasks(self, *_: Any, **__: Any) -> list[Any]:
        starts = self._starts
        return [
            ReadTask(
                partial(_read, self._options, start, starts.step),
                BlockMetadata(
                    num_rows=min(starts.step, starts.stop - start),
                    size_bytes=None,
                    input_files=None,
                    exec_stats=None,
                ),
            )
            for start in starts
        ]


def _read(options: Options, start: int, size: int) -> list[Any]:
    rows = list(islice(open_source(options.input).rows(start), size))
    index = range(start, start + len(rows))
    # A row that could not be read has no line.
    lines = [None if isinstance(row, BadRow) else to_line(row) for row in rows]
    reasons = [row.reason if isinstance(row, BadRow) else None for row in rows]
    return [
        pa.table(
            {
                "index": pa.array(index, pa.int64()),
                "line": pa.array(lines, pa.large_binary()),
                "reason": pa.array(reasons, pa.string()),
            }
        )
    ]


class _LineCompletions:
    """An actor's engine, called with tables of lines."""

    def __init__(self, options: Options, first: Row | BadRow) -> None:
        self._form = format_of(first, options)
        self._engine = LocalEngine(options.engine)

    def __call__(self, table: Any) -> Any:
        served = list(serve(_numbered(table.to_pylist()), self._form, self._engine))
        columns = {name: [getattr(row, name) for row in served] for name in ("index", *COUNTS)}
        lines = pa.array([to_line(row.row) for row in served], pa.large_binary())
        return pa.table(columns | {"line": lines})


def _numbered(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[int, Row | BadRow]]:
    for row in rows:
        is_bad = row["line"] is None
        yield row["index"], BadRow(row["reason"]) if is_bad else json.loads(row["line"])
