"""Tests that a step which runs out of memory costs its call, and nobody else."""

import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import GREEDY, Ids, drain, make_llm, make_paged_llm

MIXED = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=9),
    SamplingParams(presence_penalty=1, seed=2, max_tokens=9, logprobs=1, prompt_logprobs=0),
    SamplingParams(n=3, seed=3, max_tokens=9, repetition_penalty=1.2),
]


class Allocator(TorchDispatchMode):
    """Fails instead of the operation number `fails_at`, counted from 1; None never does."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.num_calls = 0
        self._fails_at = fails_at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        if self.num_calls == self._fails_at:
            raise torch.OutOfMemoryError("no memory left, says the test")
        return func(*args, **(kwargs or {}))


def add_pending(llm: LLM) -> None:
    llm.add_request([21, 22, 23], MIXED[1])
    llm.add_request([24, 25], MIXED[3])


def drained(llm: LLM) -> list[Ids]:
    """Returns the completions of what is pending, in the order of their ids."""
    return [ids for _, ids in sorted(drain(llm).items())]


def test_any_operation_of_any_step_may_fail(
    tiny_qwen3: Path, ragged_prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine keeps a caller's modes away from its steps.
    monkeypatch.setattr(model_runner, "defaults_of_torch", lambda _: nullcontext())
    prompts = [prompt[:30] for prompt in ragged_prompts[:4]]
    llm = make_paged_llm(tiny_qwen3, max_num_batched_tokens=24, num_kvcache_blocks=40)
    add_pending(llm)
    pending = drained(llm)
    with Allocator() as allocator:
        expected = llm.generate(list(prompts), MIXED, use_tqdm=False)
    assert allocator.num_calls > 1000
    for number in random.Random(0).sample(range(1, allocator.num_calls), 10):
        llm.reset_prefix_cache()
        add_pending(llm)
        with pytest.raises(torch.OutOfMemoryError, match="says the test"), Allocator(number):
            llm.generate(list(prompts), MIXED, use_tqdm=False)
        assert llm.generate(list(prompts), MIXED, use_tqdm=False) == expected
        assert drained(llm) == pending
        manager = llm.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        manager.check_integrity([])


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_ballast_on_the_gpu(tmp_path: Path, enforce_eager: bool) -> None:
    """Another program takes what memory is left; when it gives it back, all is as it was."""
    checkpoint = make_checkpoint(tmp_path, max_position_embeddings=16384)
    long_prompt = list(range(2, 502)) * 16
    sizes = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "num_kvcache_blocks": 2048}
    with make_llm(checkpoint, device="cuda", enforce_eager=enforce_eager, **sizes) as llm:
        add_pending(llm)
        pending = drained(llm)
        expected = llm.generate([long_prompt], GREEDY, use_tqdm=False)
        llm.reset_prefix_cache()
        add_pending(llm)
        torch.cuda.empty_cache()
        ballast = fill_the_gpu()
        with pytest.raises(torch.OutOfMemoryError):
            llm.generate([long_prompt], GREEDY, use_tqdm=False)
        ballast.clear()
        torch.cuda.empty_cache()
        assert drained(llm) == pending
        assert llm.generate([long_prompt], GREEDY, use_tqdm=False) == expected


def fill_the_gpu() -> list[torch.Tensor]:
    """Allocates all of the GPU's free memory, to the last 2 MiB."""
    ballast: list[torch.Tensor] = []
    size = torch.cuda.mem_get_info()[0]
    while size >= 2**21:
        try:
            ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return ballast
