"""Tests that an engine takes its share of GPU memory, never exceeds it, and frees all of it.

The shares leave room for what waiting processes of the suite hold.
"""

import gc
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.helpers.checkpoints import make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB = 2**20


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a checkpoint with Qwen3's real vocabulary size, so that logits take a realistic amount
    of memory."""
    return make_checkpoint(
        tmp_path_factory.mktemp("wide"),
        vocab_size=151936,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
        with_tokenizer=False,
    )


@pytest.mark.parametrize("utilization", [0.4, 0.75])
def test_share_is_met_and_kept(utilization: float, checkpoint: Path) -> None:
    """The engine is within 3 % of its share after construction, and never above it with 512
    sequences."""
    start = free_bytes()
    total = torch.cuda.mem_get_info()[1]
    with LLM(str(checkpoint), gpu_memory_utilization=utilization, max_num_seqs=512) as llm:
        share = (start - torch.cuda.mem_get_info()[0]) / total
        print(f"share after construction {share:.4f} of {utilization}")
        assert utilization * 0.97 <= share <= utilization
        lengths = [1 + i * 7 % 900 for i in range(600)]
        prompts = [[(i + j) % 1000 for j in range(n)] for i, n in enumerate(lengths)]
        lowest = free_during_generate(llm, prompts)
        print(f"highest share while running {(start - lowest) / total:.4f}")
        assert start - lowest <= utilization * total


def free_during_generate(llm: LLM, prompts: list[list[int]]) -> int:
    """Returns the least free memory after any step."""
    lowest = torch.cuda.mem_get_info()[0]
    step = llm._step

    def watched_step() -> object:
        nonlocal lowest
        result = step()
        lowest = min(lowest, torch.cuda.mem_get_info()[0])
        return result

    llm._step = watched_step  # type: ignore[method-assign, assignment]
    params = SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    assert all(len(output["token_ids"]) == 60 for output in outputs)
    return lowest


def test_two_engines_share_a_gpu(checkpoint: Path) -> None:
    # Autotuning may choose different matmuls, which round differently, for the two engines.
    config = {"gpu_memory_utilization": 0.35, "max_num_seqs": 32, "autotune_matmul": False}
    params = SamplingParams(temperature=0.7, max_tokens=16, ignore_eos=True, seed=3)
    prompts = [[1, 2, 3], [4, 5]]
    with LLM(str(checkpoint), **config) as first, LLM(str(checkpoint), **config) as second:
        assert first._runner is not None
        assert second._runner is not None
        ratio = second._runner.num_blocks / first._runner.num_blocks
        assert 0.95 < ratio < 1.05
        alone = first.generate(prompts, params, use_tqdm=False)
        assert second.generate(prompts, params, use_tqdm=False) == alone
        assert first.generate(prompts, params, use_tqdm=False) == alone


def test_exit_gives_everything_back(checkpoint: Path) -> None:
    frees = []
    for _ in range(3):
        llm = LLM(str(checkpoint), gpu_memory_utilization=0.75, max_num_seqs=8)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
        llm.exit()
        torch.cuda.synchronize()
        frees.append(torch.cuda.mem_get_info()[0])
    print([free // MIB for free in frees])
    assert abs(frees[1] - frees[0]) <= 64 * MIB
    assert abs(frees[2] - frees[0]) <= 64 * MIB


def test_del_gives_everything_back(checkpoint: Path) -> None:
    before = free_bytes()
    llm = LLM(str(checkpoint), gpu_memory_utilization=0.3, max_num_seqs=8)
    del llm
    assert before - torch.cuda.mem_get_info()[0] <= 256 * MIB


def test_num_kvcache_blocks_is_obeyed(checkpoint: Path) -> None:
    before = free_bytes()
    with LLM(str(checkpoint), num_kvcache_blocks=20, max_num_seqs=8) as llm:
        assert llm._runner is not None
        assert llm._runner.num_blocks == llm.scheduler.block_manager.num_blocks == 20
        assert before - torch.cuda.mem_get_info()[0] < 4 * 2**30


def test_too_little_memory_names_numbers_and_knobs(checkpoint: Path) -> None:
    before = free_bytes()
    with pytest.raises(ValueError, match="GiB") as error:
        LLM(str(checkpoint), gpu_memory_utilization=0.001, max_num_seqs=8)
    for knob in ("gpu_memory_utilization", "max_model_len", "max_num_batched_tokens"):
        assert knob in str(error.value)
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=10000000.*at most"):
        LLM(str(checkpoint), num_kvcache_blocks=10_000_000, max_num_seqs=8)
    assert before - torch.cuda.mem_get_info()[0] <= 256 * MIB, "the held exception holds memory"


def test_memory_of_others_does_not_count(checkpoint: Path) -> None:
    """The engine takes a full share of 0.3 even if other processes hold more than that."""
    total = torch.cuda.mem_get_info()[1]
    ballast = torch.empty(int(total * 0.45), dtype=torch.uint8, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    with LLM(str(checkpoint), gpu_memory_utilization=0.3, max_num_seqs=8):
        used = before - torch.cuda.mem_get_info()[0]
        assert 0.97 * 0.3 <= used / total <= 0.3
    del ballast


def test_a_gpu_that_others_fill(checkpoint: Path) -> None:
    """If less memory is free than the engine's share, it takes what is free, and its steps still
    fit."""
    ballast = torch.empty(free_bytes() - 6 * 2**30, dtype=torch.uint8, device="cuda")
    with LLM(str(checkpoint), gpu_memory_utilization=0.9, max_num_seqs=512) as llm:
        lowest = free_during_generate(llm, [[1] * 500 for _ in range(512)])
        print(f"at least {lowest / MIB:.0f} MiB were free")
    del ballast
