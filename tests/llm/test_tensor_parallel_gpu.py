"""Two ranks on two GPUs compute what one GPU does, with and without memory that they share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM
from tests.engine.test_executor import parts
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.reference import greedy_ids
from tests.llm.test_tensor_parallel import (
    MODELS,
    NUM_TOKENS,
    Prompts,
    capture_logits,
    ids,
    mixed_params,
)

pytestmark = pytest.mark.gpu2

LONG = [[token % 500 for token in range(i, i + 900)] for i in range(8)]  # more than small messages


def make_llm(checkpoint: Path, size: int, **config: Any) -> LLM:
    sizes = {"max_model_len": 1024, "kvcache_block_size": 16, "num_kvcache_blocks": 2048}
    defaults = sizes | {"max_num_seqs": 32, "device": "cuda", "tensor_parallel_size": size}
    return LLM(str(checkpoint), **(defaults | config))


def ids_of_one_gpu(checkpoint: Path, prompts: Prompts) -> Prompts:
    with make_llm(checkpoint, 1, enable_prefix_caching=False, async_scheduling=False) as llm:
        return ids(llm, prompts)


@pytest.fixture(scope="module")
def pair(tiny_qwen3: Path) -> Iterator[LLM]:
    with make_llm(tiny_qwen3, 2) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, ragged_prompts: Prompts) -> Prompts:
    return ids_of_one_gpu(tiny_qwen3, ragged_prompts)


def test_gpus_share_memory_and_the_process_is_the_users(pair: LLM) -> None:
    assert parts(pair)[0].group.peers is not None, "only then the fused kernels are tested"
    assert torch.cuda.current_device() == 0
    assert not torch.distributed.is_initialized()
    assert not [name for name in os.environ if name.startswith("TORCH_NCCL_")]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("budget", [16384, 64, 7])
def test_chunks_cache_hits_and_waiting_for_each_step(
    pair: LLM,
    budget: int,
    is_async: bool,
    ragged_prompts: Prompts,
    expected: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair.scheduler, "max_num_batched_tokens", budget)
    monkeypatch.setattr(pair.config, "async_scheduling", is_async)
    for _ in range(2):
        assert ids(pair, ragged_prompts) == expected


def test_preemption_without_graphs(tiny_qwen3: Path, ragged_prompts: Prompts) -> None:
    prompts = ragged_prompts[16:]
    expected = ids_of_one_gpu(tiny_qwen3, prompts)
    small = {"kvcache_block_size": 4, "num_kvcache_blocks": 36, "max_model_len": 128}
    with make_llm(tiny_qwen3, 2, enforce_eager=True, **small) as llm:
        for _ in range(2):
            assert ids(llm, prompts) == expected
        assert llm.scheduler.num_preemptions > 5


@pytest.mark.parametrize("name", [name for name, (size, _) in MODELS.items() if size == 2])
def test_models(name: str, tmp_path: Path, ragged_prompts: Prompts) -> None:
    checkpoint = make_checkpoint(tmp_path, with_tokenizer=False, **MODELS[name][1])
    prompts = [[token % 509 for token in prompt] for prompt in ragged_prompts[:12] + LONG]
    expected = ids_of_one_gpu(checkpoint, prompts)
    with make_llm(checkpoint, 2) as llm:
        for _ in range(2):
            assert ids(llm, prompts) == expected


def test_bfloat16(tmp_path: Path, ragged_prompts: Prompts) -> None:
    checkpoint = make_checkpoint(tmp_path, dtype=torch.bfloat16, with_tokenizer=False)
    logits = []
    for size in (1, 2):
        with make_llm(checkpoint, size) as llm:
            captured = capture_logits(llm)
            greedy_ids(llm, ragged_prompts[:8], NUM_TOKENS)
            logits.append(captured[0])
    assert logits[1].shape == (8, 256)
    torch.testing.assert_close(logits[1], logits[0][:, :256], atol=0.15, rtol=0.05)


def test_two_engines_in_turns(pair: LLM, tiny_qwen3: Path, ragged_prompts: Prompts) -> None:
    prompts = ragged_prompts[:8]
    expected = ids_of_one_gpu(tiny_qwen3, prompts)
    with make_llm(tiny_qwen3, 2) as other:
        finished: list[dict[int, list[int]]] = [{}, {}]
        for request in zip(prompts, mixed_params(8), strict=True):
            for llm in (pair, other):
                llm.add_request(*request)
        while not (pair.is_finished() and other.is_finished()):
            for llm, results in zip((pair, other), finished, strict=True):
                results.update(llm.step()[0])
    assert [[ids for _, ids in sorted(results.items())] for results in finished] == [expected] * 2


@pytest.mark.usefixtures("no_peer_memory")
def test_without_peer_memory(tiny_qwen3: Path, ragged_prompts: Prompts, expected: Prompts) -> None:
    with make_llm(tiny_qwen3, 2) as llm:
        assert parts(llm)[0].group.peers is None
        assert ids(llm, ragged_prompts) == expected


def test_fewer_gpus_than_ranks(tiny_qwen3: Path) -> None:
    size = torch.cuda.device_count() + 1
    if size > 8:
        pytest.skip("as many GPUs as ranks can be")
    with pytest.raises(ValueError, match=rf"_size={size}, but torch sees {size - 1} GPUs"):
        make_llm(tiny_qwen3, size)
