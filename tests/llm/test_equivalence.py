"""Tests that the greedy tokens do not depend on how the engine schedules, on CPU and GPU (fp32)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from tests.helpers.closeness import assert_logits_close
from tests.helpers.engines import SIZES, greedy_ids, make_llm
from tests.helpers.reference import next_token_logits

NUM_TOKENS = 24
NUM_SLOTS = SIZES["num_kvcache_blocks"] * SIZES["kvcache_block_size"]
Prompts = list[list[int]]
MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest, tiny_qwen3: Path) -> MakeLLM:
    """Makes engines on one device, with room for all prompts unless the test asks for less."""
    return partial(make_llm, tiny_qwen3, device=request.param)


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, ragged_prompts: Prompts) -> Prompts:
    """Returns the greedy ids of an engine on the CPU that computes one prompt and one step at a
    time, without prefix cache, chunks or preemption."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 1}
    with make_llm(tiny_qwen3, **plain) as llm:
        return [greedy_ids(llm, [prompt], NUM_TOKENS)[0] for prompt in ragged_prompts]


def test_batch_of_32_equals_one_by_one(
    make: MakeLLM, ragged_prompts: Prompts, expected: Prompts
) -> None:
    assert greedy_ids(make(), ragged_prompts, NUM_TOKENS) == expected


def test_prefix_cache_off_cold_and_hit(
    make: MakeLLM, ragged_prompts: Prompts, expected: Prompts
) -> None:
    off = make(enable_prefix_caching=False)
    assert greedy_ids(off, ragged_prompts, NUM_TOKENS) == expected
    assert greedy_ids(off, ragged_prompts, NUM_TOKENS) == expected
    cached = make()
    assert greedy_ids(cached, ragged_prompts, NUM_TOKENS) == expected
    num_prefilled = count_prefilled_tokens(cached)
    assert greedy_ids(cached, ragged_prompts, NUM_TOKENS) == expected
    assert sum(num_prefilled) < sum(map(len, ragged_prompts)), "the second run had no hits"


def test_waiting_for_each_step(make: MakeLLM, ragged_prompts: Prompts, expected: Prompts) -> None:
    llm = make(async_scheduling=False, max_num_seqs=9)
    assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected


def count_prefilled_tokens(llm: LLM) -> list[int]:
    """Records the number of tokens of each prefill step from now on."""
    counts: list[int] = []
    schedule = llm.scheduler.schedule

    def spy() -> Any:
        batch = schedule()
        if batch is not None and batch.prefill:
            counts.append(batch.num_prefilled)
        return batch

    llm.scheduler.schedule = spy  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("budget", [7, 64, 16384])
def test_chunked_prefill(
    budget: int, make: MakeLLM, ragged_prompts: Prompts, expected: Prompts
) -> None:
    llm = make(max_num_batched_tokens=budget)
    counts = count_prefilled_tokens(llm)
    assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected
    assert max(counts) <= budget
    assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected  # chunks follow cache hits


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [20, 16384])
def test_preemption(
    enable_prefix_caching: bool,
    budget: int,
    make: MakeLLM,
    ragged_prompts: Prompts,
    expected: Prompts,
) -> None:
    llm = make(
        num_kvcache_blocks=9,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=budget,
    )
    assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected
    assert llm.scheduler.num_preemptions > 0
    llm.scheduler.block_manager.check_integrity([])


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
def test_block_sizes(
    block_size: int, make: MakeLLM, ragged_prompts: Prompts, expected: Prompts
) -> None:
    llm = make(kvcache_block_size=block_size, num_kvcache_blocks=NUM_SLOTS // block_size)
    for _ in range(2):
        assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected


def test_a_prompt_of_one_token_that_is_cached(make: MakeLLM) -> None:
    llm = make(kvcache_block_size=1, num_kvcache_blocks=NUM_SLOTS)
    first, again = (next_token_logits(llm, [[361]]) for _ in range(2))
    assert_logits_close(again, first)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 17])
def test_max_num_seqs(
    max_num_seqs: int, make: MakeLLM, ragged_prompts: Prompts, expected: Prompts
) -> None:
    llm = make(max_num_seqs=max_num_seqs)
    assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("attention_backend", ["torch", "triton"])
def test_gpu_backends_and_modes(
    attention_backend: str,
    enforce_eager: bool,
    tiny_qwen3: Path,
    ragged_prompts: Prompts,
    expected: Prompts,
) -> None:
    config = {"attention_backend": attention_backend, "enforce_eager": enforce_eager}
    llm = make_llm(tiny_qwen3, device="cuda", **config)
    assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected


def test_prompt_lengths_around_a_block(make: MakeLLM, ragged_prompts: Prompts) -> None:
    tokens = [token for prompt in ragged_prompts for token in prompt]
    prompts = [tokens[:length] for length in (15, 16, 17, 31, 32, 33)]
    alone = make(enable_prefix_caching=False, max_num_seqs=1)
    together = make(max_num_batched_tokens=16)
    for _ in range(2):
        assert greedy_ids(together, prompts, NUM_TOKENS) == greedy_ids(alone, prompts, NUM_TOKENS)
