"""Parquet files of rows. Such a file cannot grow, so it is written once all results are there."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.batch.files import BadRow, JsonLines, Row, Source

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ValueError("Parquet files need pyarrow: pip install 'nanovllm[batch]'") from error

ROWS_AT_A_TIME = 1024


class ParquetRows:
    """The rows of a Parquet file, read a few at a time."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        self.num_rows: int = self._file.metadata.num_rows

    def rows(self, start: int) -> Iterator[Row | BadRow]:
        for batch in self.batches(start):
            yield from batch.to_pylist()

    def batches(self, start: int = 0) -> Iterator[Any]:
        """Yields record batches from row `start` on; row groups before it are not read."""
        metadata = self._file.metadata
        groups = list(range(metadata.num_row_groups))
        while groups and metadata.row_group(groups[0]).num_rows <= start:
            start -= metadata.row_group(groups.pop(0)).num_rows
        for batch in self._file.iter_batches(ROWS_AT_A_TIME, row_groups=groups):
            if start < len(batch):
                yield batch.slice(start)
            start = max(start - len(batch), 0)


def write_parquet(source: Source, results: Path, output: Path) -> None:
    """Writes the rows of `source`, each with the columns of its line of `results`, to `output`.

    The columns of a Parquet source keep their types. The types of all others are those of their
    values; raises `ValueError` if these differ from row to row. `output` appears as a whole.
    """
    lines = JsonLines(results)
    schema = None
    try:
        for table in _tables(source, lines):  # the first pass finds the types
            parts = [table.schema] if schema is None else [schema, table.schema]
            schema = pa.unify_schemas(parts, promote_options="permissive")
        partial = output.with_name(output.name + ".tmp")
        with pq.ParquetWriter(partial, schema or pa.schema([])) as writer:
            for table in _tables(source, lines):
                writer.write_table(_conformed(table, schema))
    except pa.ArrowException as error:
        raise ValueError(
            f"the rows do not fit into the columns of a Parquet file ({error}); all results are in "
            f"{results}, and an output that ends in .jsonl takes any rows"
        ) from error
    partial.replace(output)


def _tables(source: Source, results: JsonLines) -> Iterator[Any]:
    """Yields tables of some rows with their results."""
    added = results.rows(0)
    if isinstance(source, ParquetRows):
        for batch in source.batches():
            table = pa.Table.from_batches([batch])
            more = pa.Table.from_pylist(_even(list(islice(added, len(batch)))))
            for name in more.column_names:
                table = table.append_column(name, more[name])
            yield table
        return
    rows = source.rows(0)
    while piece := list(islice(rows, ROWS_AT_A_TIME)):
        whole: list[Row] = []
        for row, result in zip(piece, added, strict=False):
            whole.append({**(row if isinstance(row, dict) else {}), **result})  # type: ignore[dict-item]
        yield pa.Table.from_pylist(_even(whole))


def _even(rows: list[Any]) -> list[Row]:
    """Returns rows that have all the same columns: `from_pylist` looks at the first one's only."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _conformed(table: Any, schema: Any) -> Any:
    """Returns the table with all columns of `schema`, in its order and types."""
    columns = [
        table[name].cast(schema.field(name).type)
        if name in table.column_names
        else pa.nulls(len(table), schema.field(name).type)
        for name in schema.names
    ]
    return pa.table(columns, schema=schema)
