"""Tests that several ranks compute what one rank computes (fp32), however the engine schedules."""

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm import LLM
from nanovllm.engine import workers
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.ipc import Sender
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.utils.distributed import TPGroup
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.closeness import assert_logits_close
from tests.helpers.engines import SAMPLED, greedy_ids, make_llm
from tests.helpers.ranks import (
    LONG,
    LONG_SIZES,
    capture_logits,
    ids_of_one_rank,
    mixed_ids,
    mixed_params,
    parallel,
)

Prompts = list[list[int]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Returns the device of the compared engines: on the CPU the ranks are processes, on CUDA each
    has a GPU."""
    return str(request.param)


def make_ranks(checkpoint: Path, size: int, **config: Any) -> LLM:
    return make_llm(checkpoint, tensor_parallel_size=size, **config)


def sent_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Records the messages to the workers from now on."""
    sent: list[bytes] = []
    sender = parallel(llm)._ranks.workers._sender
    assert sender is not None
    send = sender.send

    def recorded(message: bytes, check: Callable[[], None]) -> None:
        sent.append(message)
        send(message, check)

    monkeypatch.setattr(sender, "send", recorded)
    return sent


def batch_of(message: bytes) -> ScheduledBatch:
    method, (batch,) = pickle.loads(message)
    assert method == "launch"
    assert isinstance(batch, ScheduledBatch)
    return batch


@pytest.fixture(scope="module")
def pair(tiny_qwen3: Path, device: str) -> Iterator[LLM]:
    """Provides an engine of two ranks that all tests share: they change settings of rank 0 only."""
    with make_ranks(tiny_qwen3, 2, device=device) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, ragged_prompts: Prompts, device: str) -> Prompts:
    return ids_of_one_rank(tiny_qwen3, ragged_prompts, device=device)


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
    """Only the first run of this test starts with a cold prefix cache."""
    monkeypatch.setattr(pair.scheduler, "max_num_batched_tokens", budget)
    monkeypatch.setattr(pair.config, "async_scheduling", is_async)
    sent = sent_batches(pair, monkeypatch)
    assert mixed_ids(pair, ragged_prompts) == expected
    assert max(batch_of(message).num_prefilled for message in sent) <= budget
    assert mixed_ids(pair, ragged_prompts) == expected


def test_requests_without_seed_and_chunks_with_a_cold_prefix_cache(
    tiny_qwen3: Path, device: str, ragged_prompts: Prompts, expected: Prompts
) -> None:
    config = {"device": device, "max_num_batched_tokens": 50}
    one, two = (make_ranks(tiny_qwen3, size, **config) for size in (1, 2))
    runs = [llm.generate(ragged_prompts[:4], SAMPLED, use_tqdm=False) for llm in (one, two)]
    assert runs[0] == runs[1]
    assert mixed_ids(two, ragged_prompts) == expected
    two.exit()


def test_preemption_small_blocks_and_messages_larger_than_the_segment(
    tiny_qwen3: Path, device: str, ragged_prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs eagerly, so this also covers GPUs without CUDA graphs."""
    prompts = ragged_prompts[16:]
    expected = ids_of_one_rank(tiny_qwen3, prompts, device=device)
    monkeypatch.setattr(workers, "Sender", partial(Sender, num_slots=3, slot_bytes=64))
    small = {"kvcache_block_size": 4, "num_kvcache_blocks": 36, "enforce_eager": True}
    with make_ranks(tiny_qwen3, 2, device=device, **small) as llm:
        # A reserve would avoid preemptions.
        monkeypatch.setattr(llm.scheduler, "reserved_tokens", 0)
        sent = sent_batches(llm, monkeypatch)
        for _ in range(2):
            assert mixed_ids(llm, prompts) == expected
        assert llm.scheduler.num_preemptions > 5
        assert max(map(len, sent)) > 3 * 64 > min(map(len, sent))
        llm.scheduler.block_manager.check_integrity([])


def test_only_what_a_step_computes_crosses(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = list(range(2, 102))
    greedy_ids(pair, [shared], 1)
    sent = sent_batches(pair, monkeypatch)
    greedy_ids(pair, [[*shared, 200 + i] for i in range(32)], 4)
    prefill, *decodes = map(batch_of, sent)
    assert prefill.prefill is not None
    assert [chunk.start for chunk in prefill.prefill.chunks] == [96] * 32
    assert prefill.num_prefilled == 32 * 5
    assert [(batch.num_prefilled, batch.num_decoded) for batch in decodes] == [(0, 32)] * 3
    assert max(map(len, sent[1:])) < 500


ONE_KV_HEAD = {"num_key_value_heads": 1, "vocab_size": 509}
UNTIED = ONE_KV_HEAD | {"tie_word_embeddings": False}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "one K/V head for two ranks, uneven vocabulary, untied": (2, UNTIED),
    "biases, three ranks": (3, ONE_KV_HEAD | {"num_attention_heads": 6, "attention_bias": True}),
    "two K/V heads for four ranks": (4, {"vocab_size": 510, "attention_bias": True}),
    "Qwen2": (2, {"architecture": "Qwen2ForCausalLM"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, device: str, tmp_path: Path, ragged_prompts: Prompts) -> None:
    size, overrides = MODELS[name]
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    checkpoint = make_checkpoint(tmp_path, with_tokenizer=False, **overrides)
    prompts = [[token % 509 for token in prompt] for prompt in ragged_prompts[:12]]
    config: dict[str, Any] = {"device": device, "max_num_batched_tokens": 200}
    if device == "cuda":
        prompts, config = prompts + LONG, {"device": device} | LONG_SIZES
    expected = ids_of_one_rank(checkpoint, prompts, **config)
    with make_ranks(checkpoint, size, **config) as llm:
        for _ in range(2):
            assert mixed_ids(llm, prompts) == expected


def test_padding_never_wins_over_negative_logits(tmp_path: Path, ragged_prompts: Prompts) -> None:
    """All logits are negative, because the hidden states' first entry is large and its weights are
    negative, so a padding row of zeros would have the largest logit."""
    checkpoint = make_checkpoint(tmp_path, with_tokenizer=False, **UNTIED)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0], tensors["lm_head.weight"][:, 0] = 1000, -20
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    prompts = [[token % 509 for token in prompt] for prompt in ragged_prompts]
    expected = ids_of_one_rank(checkpoint, prompts)
    with make_ranks(checkpoint, 2) as llm:
        logits = capture_logits(llm)
        assert mixed_ids(llm, prompts) == expected
    assert max(float(step.max()) for step in logits) < -50
    assert max(token for completion in expected for token in completion) < 509


def test_bfloat16(device: str, tmp_path: Path, ragged_prompts: Prompts) -> None:
    checkpoint = make_checkpoint(tmp_path, dtype=torch.bfloat16, with_tokenizer=False)
    logits = []
    for size in (1, 2):
        with make_ranks(checkpoint, size, device=device) as llm:
            captured = capture_logits(llm)
            greedy_ids(llm, ragged_prompts[:8], 2)
            logits.append(captured[0])
    whole, half = logits
    assert half.shape == (8, 256)
    assert_logits_close(half, whole[:, :256], torch.bfloat16)


def test_two_engines_in_turns(
    pair: LLM, device: str, tmp_path: Path, ragged_prompts: Prompts, expected: Prompts
) -> None:
    checkpoint = make_checkpoint(tmp_path, seed=1, with_tokenizer=False)
    prompts = ragged_prompts[:8]
    expected_of = [expected[:8], ids_of_one_rank(checkpoint, prompts, device=device)]
    assert expected_of[0] != expected_of[1]
    with make_ranks(checkpoint, 2, device=device) as other:
        finished: list[dict[int, list[int]]] = [{}, {}]
        for request in zip(prompts, mixed_params(8), strict=True):
            for llm in (pair, other):
                llm.add_request(*request)
        while not (pair.is_finished() and other.is_finished()):
            for llm, results in zip((pair, other), finished, strict=True):
                results.update(llm.step()[0])
    assert [[ids for _, ids in sorted(results.items())] for results in finished] == expected_of


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (3, {}, "num_attention_heads=4 does not divide by tensor_parallel_size=3"),
        (2, {"intermediate_size": 97}, "intermediate_size=97 does not divide by .*_size=2"),
        (
            2,
            SIX_HEADS,
            "num_key_value_heads=3 and tensor_parallel_size=2 do not divide one another",
        ),
    ],
)
def test_what_does_not_divide_is_refused_before_a_process_starts(
    size: int,
    overrides: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers.Workers, "start", lambda *_: pytest.fail("it has started"))
    checkpoint = make_checkpoint(tmp_path, with_tokenizer=False, **overrides)
    with pytest.raises(ValueError, match=message):
        make_ranks(checkpoint, size)


@pytest.mark.parametrize("vocab_size", [9, 16, 509, 512])
def test_shares_cover_the_vocabulary(vocab_size: int) -> None:
    hidden = torch.ones(2, 4)
    for size in (1, 2, 3, 8):
        seen: list[int] = []
        for rank in range(size):
            head = ParallelLMHead(TPGroup(rank, size), vocab_size, 4)
            assert len(head.weight) * size >= vocab_size
            nn.init.zeros_(head.weight)
            is_padding = head(hidden).isinf().all(dim=0)
            seen += [head.first_id + i for i in range(len(head.weight)) if not is_padding[i]]
        assert seen == list(range(vocab_size))
