"""Tests that a mixture of experts generates the same greedy tokens however the engine schedules, on
one rank and on two (fp32)."""

from pathlib import Path

import pytest

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import greedy_ids, make_llm

NUM_TOKENS = 16
Prompts = list[list[int]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experts; the first layer has one MLP."""
    path = tmp_path_factory.mktemp("experts")
    shape = {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    return make_checkpoint(path, "Qwen3MoeForCausalLM", with_tokenizer=False, **shape)


@pytest.fixture(scope="module")
def prompts(ragged_prompts: Prompts) -> Prompts:
    return ragged_prompts[:4] + ragged_prompts[24:28]  # the latter share a prefix


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: Prompts) -> Prompts:
    """Returns the greedy ids of each prompt alone, without prefix cache."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 1}
    with make_llm(checkpoint, **plain) as llm:
        ids = greedy_ids(llm, prompts, NUM_TOKENS)
    assert len({token for completion in ids for token in completion}) > 30, "degenerate text"
    return ids


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [7, 16384])
def test_chunks_and_cache_hits(
    budget: int, device: str, checkpoint: Path, prompts: Prompts, expected: Prompts
) -> None:
    with make_llm(checkpoint, device=device, max_num_batched_tokens=budget) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert greedy_ids(llm, prompts, NUM_TOKENS) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_the_cpu(dtype: str, checkpoint: Path, prompts: Prompts) -> None:
    with make_llm(checkpoint, dtype=dtype) as llm:
        ids = greedy_ids(llm, prompts, NUM_TOKENS)
    assert [len(completion) for completion in ids] == [NUM_TOKENS] * len(prompts)


@pytest.mark.gpu
def test_eager_steps(checkpoint: Path, prompts: Prompts, expected: Prompts) -> None:
    with make_llm(checkpoint, device="cuda", enforce_eager=True) as llm:
        assert greedy_ids(llm, prompts, NUM_TOKENS) == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
def test_two_ranks(device: str, checkpoint: Path, prompts: Prompts, expected: Prompts) -> None:
    config = {"device": device, "tensor_parallel_size": 2, "max_num_batched_tokens": 64}
    with make_llm(checkpoint, **config) as llm:
        for _ in range(2):
            assert greedy_ids(llm, prompts, NUM_TOKENS) == expected
