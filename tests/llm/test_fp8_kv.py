"""Tests engines that keep K and V in 8 bits: how it is scheduled decides about no token, the pool
has the room that it should, logits stay close, and who cannot do it says so."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers import attention_backends
from nanovllm.layers.attention_backends import AttentionLayout, select_backend
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.reference import HuggingFace, next_token_logits

NUM_TOKENS = 16
Prompts = list[list[int]]
MakeLLM = Callable[..., LLM]
CONFIGS: dict[str, dict[str, Any]] = {
    "cold and cached": {},
    "chunked": {"max_num_batched_tokens": 23},
    "preempting": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 20},
    "blocks of one token": {"kvcache_block_size": 1, "num_kvcache_blocks": 4096},
    "synchronous": {"async_scheduling": False, "max_num_seqs": 3},
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest, tiny_qwen3: Path) -> MakeLLM:
    return partial(make_llm, tiny_qwen3, device=request.param, kv_cache_dtype="fp8")


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, ragged_prompts: Prompts) -> Prompts:
    """Returns the ids of an engine on the CPU that computes one prompt and one step at a time."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 1}
    with make_llm(tiny_qwen3, kv_cache_dtype="fp8", **plain) as llm:
        return [greedy_ids(llm, [prompt], NUM_TOKENS)[0] for prompt in ragged_prompts]


@pytest.mark.parametrize("config", CONFIGS)
def test_scheduling_changes_no_token(
    config: str, make: MakeLLM, ragged_prompts: Prompts, expected: Prompts
) -> None:
    with make(**CONFIGS[config]) as llm:
        for _ in range(2):  # the second time chunks follow cache hits
            assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected
