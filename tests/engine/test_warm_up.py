"""Tests that the steps which measure a GPU's working memory are as large as any later one."""

import random
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.warm_up import warm_up_batches
from nanovllm.sampling_params import SamplingParams


def scheduled(config: Config) -> Iterator[ScheduledBatch]:
    """Yields the steps of a scheduler that has more requests than fit, with several samples, and of
    every length up to `max_model_len`."""
    manager = BlockManager(10**6, config.kvcache_block_size, enable_prefix_caching=False)
    limits = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    scheduler = Scheduler(manager, stop_token_ids=(), **limits)
    rng, longest = random.Random(0), config.max_model_len - 1
    seq_id = 0
    lengths = [longest] * 3 + [rng.choice([1, longest, rng.randint(1, longest)]) for _ in range(60)]
    for length in lengths + [1] * 2 * config.max_num_seqs:
        params = SamplingParams(n=rng.choice([1, 1, config.max_num_seqs]), max_tokens=4)
        prompt, max_len = array("q", [7] * length), config.max_model_len
        scheduler.add(Sequence(seq_id, prompt, params, max_model_len=max_len, seed=0))
        seq_id += params.n
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        assert batch is not None
        yield batch
        scheduler.postprocess(batch, [7] * len(batch.sampled_seq_ids))


def largest(batches: Iterable[ScheduledBatch]) -> dict[str, int]:
    """Returns the largest sizes of parts of steps: what they compute and what they sample, on which
    their memory depends."""
    sizes = {"tokens": 0, "samples": 0, "sequences": 0, "decoded": 0, "context": 0}
    for batch in batches:
        found = {"decoded": batch.num_decoded}
        for part in (batch.decode, batch.prefill):
            if part is not None:
                found["context"] = max(found.get("context", 0), part.max_context_len)
        if batch.prefill is not None:
            found["tokens"], found["sequences"] = batch.num_prefilled, len(batch.prefill.rows)
            found["samples"] = len(batch.prefill.sampled_rows)
        found["samples"] = max(found.get("samples", 0), batch.num_decoded)
        sizes = {name: max(size, found.get(name, 0)) for name, size in sizes.items()}
    return sizes


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "max_model_len"),
    [(512, 24, 64), (40, 24, 300), (10, 24, 64), (512, 1, 100), (3, 5, 3)],
)
def test_no_step_is_larger_than_those_of_the_warm_up(
    budget: int, max_num_seqs: int, max_model_len: int, tiny_qwen3: Path
) -> None:
    config = Config(
        str(tiny_qwen3), device="cpu", max_num_batched_tokens=budget, max_num_seqs=max_num_seqs,
        max_model_len=max_model_len, kvcache_block_size=16,
    )  # fmt: skip
    warm = largest(warm_up_batches(config, decode_sizes=[]))
    real = largest(scheduled(config))
    assert {name: size for name, size in real.items() if size > warm[name]} == {}
    # All that a logit takes memory for is reached, so that the comparison says something.
    assert (real["decoded"], real["samples"]) == (max_num_seqs, max_num_seqs)
    assert real["tokens"] == min(budget, max_num_seqs * (max_model_len - 1))
