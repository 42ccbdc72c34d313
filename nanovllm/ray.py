"""Completes the prompts of a Ray Dataset: one engine per actor, rows in, rows with results out.

Ray places the actors, starts them again when they or their nodes are lost, and repeats what they
had not finished; each row comes out once. Needs the extra `nanovllm[ray]`.
"""

import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanovllm.batch.engines import LocalEngine
from nanovllm.batch.requests import RESULT_NAMES, PlainRows, SamplingDefaults
from nanovllm.batch.serving import serve
from nanovllm.sampling_params import MAX_SEED, SamplingParams

try:
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy, Dataset
except ImportError as error:
    raise ImportError("nanovllm.ray needs Ray Data: pip install 'nanovllm[ray]'") from error

TYPES = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int64()),
    "finish_reason": pa.string(),
    "error": pa.string(),
}
LOGPROBS = pa.list_(pa.map_(pa.int64(), pa.float64()))


def generate(
    dataset: Dataset,
    model: str,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    *,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 2048,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    result_prefix: str = "",
) -> Dataset:
    """Returns the rows of `dataset` with the columns text, token_ids, finish_reason and error.

    model: a checkpoint that every node finds under this name.
    sampling_params: for all rows; a column `sampling_params` of dicts overrides them by row.
    engine: keywords of `LLM`. An actor takes as many GPUs as `tensor_parallel_size` says, and half
        a CPU instead with device="cpu" or in a cluster without GPUs.
    concurrency: actors, or the fewest and the most.
    batch_size: rows that an actor gets at a time. An engine is full until the last of them run, so
        it should be several times `max_num_seqs`.
    prompt_column, messages_column: where rows keep their prompt or conversation; None for both
        means "prompt" and "messages".
    result_prefix: begins the names of the new columns.

    A row that cannot be served has its reason in `error`, and null in the others.
    """
    given = _given(sampling_params)
    keywords = {"seed": random.SystemRandom().randint(0, MAX_SEED), **(engine or {})}
    return dataset.map_batches(
        _Completions,
        fn_constructor_kwargs={
            "keywords": {"model": model, **keywords},
            "sampling": given,
            "prompt_column": prompt_column,
            "messages_column": messages_column,
            "result_prefix": result_prefix,
        },
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=pool(concurrency),
        **resources(keywords),
    )


def _given(params: SamplingParams | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the keywords of `SamplingParams` that differ from the defaults; it checks all."""
    if not isinstance(params, SamplingParams):
        params = SamplingParams(**(params or {}))
    default = SamplingParams()
    names = [field.name for field in fields(SamplingParams)]
    return {n: getattr(params, n) for n in names if getattr(params, n) != getattr(default, n)}


def pool(concurrency: int | tuple[int, int]) -> ActorPoolStrategy:
    """Returns a pool of so many actors, or of between so many."""
    least, most = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    return ActorPoolStrategy(min_size=least, max_size=most)


def resources(keywords: Mapping[str, Any]) -> dict[str, float]:
    """Returns what an engine with these keywords of `LLM` takes of a cluster.

    On a CPU that is half of one: what reads the rows needs one, too, and if the engines held all of
    a small machine, they would wait for rows for ever.
    """
    if keywords.get("device") == "cpu" or not ray.cluster_resources().get("GPU"):
        return {"num_cpus": 0.5}
    return {"num_gpus": int(keywords.get("tensor_parallel_size", 1))}


class _Completions:
    """An actor's engine, called with tables of rows."""

    def __init__(
        self,
        keywords: dict[str, Any],
        sampling: dict[str, Any],
        prompt_column: str | None,
        messages_column: str | None,
        result_prefix: str,
    ) -> None:
        self._prefix = result_prefix
        self._form = PlainRows(
            SamplingDefaults(sampling, None),
            prompt_column=prompt_column,
            messages_column=messages_column,
            result_prefix=result_prefix,
            whole_row=False,
        )
        self._types = dict(TYPES)
        if sampling.get("n", 1) > 1:
            sample = [(name, TYPES[name]) for name in RESULT_NAMES if name != "error"]
            self._types["outputs"] = pa.list_(pa.struct(sample))
        for name in ("logprobs", "prompt_logprobs"):
            if sampling.get(name) is not None:
                self._types[name] = LOGPROBS
        self._engine = LocalEngine(keywords)

    def __call__(self, table: Any) -> Any:
        """Returns the table with the columns of the results, which have the same types always."""
        results: list[dict[str, Any]] = [{}] * len(table)
        for served in serve(enumerate(table.to_pylist()), self._form, self._engine):
            results[served.index] = served.row
        for name, kind in self._types.items():
            column = [_as_arrow(name, result.get(self._prefix + name)) for result in results]
            table = table.append_column(self._prefix + name, pa.array(column, kind))
        return table


def _as_arrow(name: str, value: Any) -> Any:
    """Returns a value of a column as pyarrow reads it: maps as lists of pairs."""
    if value is None or name not in ("logprobs", "prompt_logprobs"):
        return value
    return [None if best is None else list(best.items()) for best in value]
