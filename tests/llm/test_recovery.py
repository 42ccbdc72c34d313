"""Tests that a step that fails or is interrupted drops the requests of its call and harms no
others."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

from nanovllm import LLM, SamplingParams
from tests.helpers.engines import (
    GREEDY,
    NUM_TOKENS,
    SAMPLED,
    Ids,
    drain,
    greedy_ids,
    make_paged_llm,
)
from tests.helpers.faults import STARTING, StepError, at_call, fail

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempting": {"num_kvcache_blocks": 20},
    "synchronous": {"async_scheduling": False},
    "uncached": {"enable_prefix_caching": False},
}


def parts_of(llm: LLM) -> dict[str, nn.Module]:
    assert llm._runner is not None
    return {"model": llm._runner.model, "sampler": llm._runner.sampler}


def interrupt(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def check_empty(llm: LLM) -> None:
    manager = llm.scheduler.block_manager
    assert llm.is_finished()
    assert llm.scheduler.num_residents == 0
    assert manager.num_free_blocks == manager.num_blocks
    manager.check_integrity([])


@pytest.fixture(params=CONFIGS)
def llm(request: pytest.FixtureRequest, tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3, **CONFIGS[request.param])


@pytest.fixture(autouse=True)
def handler() -> Iterator[object]:
    """Returns the SIGINT handler, and checks that the test has left it in place."""
    before = signal.getsignal(signal.SIGINT)
    yield before
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before


@pytest.fixture(scope="module")
def undisturbed(tiny_qwen3: Path, prompts: list[Ids]) -> dict[int, Ids]:
    """Returns the ids of the two requests of `add_pending` when no step fails."""
    llm = make_paged_llm(tiny_qwen3)
    add_pending(llm, prompts)
    return drain(llm)


def add_pending(llm: LLM, prompts: list[Ids]) -> None:
    llm.add_request(prompts[0], SAMPLED)
    llm.add_request(prompts[1], GREEDY)


@pytest.mark.parametrize("part", ["model", "sampler"])
@pytest.mark.parametrize("number", [1, 2, 3, 9])
def test_step_that_raises_in_generate(
    llm: LLM,
    part: str,
    number: int,
    prompts: list[Ids],
    hf_ids: list[Ids],
    undisturbed: dict[int, Ids],
) -> None:
    add_pending(llm, prompts)
    at_call(parts_of(llm)[part], number, fail)
    with pytest.raises(StepError):
        llm.generate([prompts[0], *prompts[2:]], SAMPLED, use_tqdm=False)
    assert len(llm.scheduler._unfinished) == 2, "those of the call are dropped, the others are not"
    assert greedy_ids(llm, prompts[2:], NUM_TOKENS) == hf_ids[2:]
    assert drain(llm) == undisturbed
    check_empty(llm)
    assert greedy_ids(llm, prompts, NUM_TOKENS) == hf_ids
    check_empty(llm)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_step_that_raises_in_step(
    llm: LLM, number: int, prompts: list[Ids], undisturbed: dict[int, Ids]
) -> None:
    add_pending(llm, prompts)
    at_call(parts_of(llm)["model"], number, fail)
    with pytest.raises(StepError):
        drain(llm)
    assert drain(llm) == undisturbed
    check_empty(llm)


def test_results_kept_for_step_survive_a_failure(
    tiny_qwen3: Path, prompts: list[Ids], hf_ids: list[Ids]
) -> None:
    llm = make_paged_llm(tiny_qwen3)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    seq_id = llm.add_request(prompts[0], short)
    at_call(parts_of(llm)["model"], 8, fail)
    with pytest.raises(StepError):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert drain(llm) == {seq_id: hf_ids[0][:2]}
    check_empty(llm)


@pytest.mark.parametrize("number", [1, 2, 9])
def test_ctrl_c_takes_effect_after_the_step(
    llm: LLM,
    number: int,
    prompts: list[Ids],
    hf_ids: list[Ids],
    undisturbed: dict[int, Ids],
) -> None:
    add_pending(llm, prompts)
    model = parts_of(llm)["model"]
    begun, ended = [], []
    model.register_forward_pre_hook(lambda *_: begun.append(1))
    model.register_forward_hook(lambda *_: ended.append(1))
    at_call(model, number, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SAMPLED, use_tqdm=False)
    assert len(begun) == len(ended) == number
    assert len(llm.scheduler._unfinished) == 2
    assert greedy_ids(llm, prompts, NUM_TOKENS) == hf_ids
    assert drain(llm) == undisturbed
    check_empty(llm)


def test_ctrl_c_while_queueing_and_in_the_only_step(
    tiny_qwen3: Path, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_paged_llm(tiny_qwen3)
    one_token = SamplingParams(max_tokens=1)
    at_call(parts_of(llm)["model"], 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, one_token, use_tqdm=False)
    check_empty(llm)
    add = llm.scheduler.add
    monkeypatch.setattr(llm.scheduler, "add", lambda seq: interrupt(add(seq)))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[0], one_token, use_tqdm=False)
    check_empty(llm)


def test_a_second_ctrl_c_acts_at_once(
    llm: LLM, prompts: list[Ids], hf_ids: list[Ids], undisturbed: dict[int, Ids]
) -> None:
    def twice() -> None:
        interrupt()
        interrupt()
        pytest.fail("the second interrupt was deferred")

    add_pending(llm, prompts)
    at_call(parts_of(llm)["model"], 3, twice)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SAMPLED, use_tqdm=False)
    assert greedy_ids(llm, prompts, NUM_TOKENS) == hf_ids
    assert drain(llm) == undisturbed
    check_empty(llm)


def test_own_signal_handler_is_called(
    tiny_qwen3: Path, prompts: list[Ids], hf_ids: list[Ids]
) -> None:
    calls: list[int] = []

    def own(signum: int, frame: FrameType | None) -> None:
        calls.append(signum)
        if len(calls) > 1:
            raise StepError

    llm = make_paged_llm(tiny_qwen3)
    before = signal.signal(signal.SIGINT, own)
    try:
        at_call(parts_of(llm)["model"], 2, interrupt)
        assert greedy_ids(llm, prompts, NUM_TOKENS) == hf_ids
        assert calls == [signal.SIGINT]
        at_call(parts_of(llm)["model"], 2, interrupt)
        with pytest.raises(StepError):
            greedy_ids(llm, prompts, NUM_TOKENS)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    check_empty(llm)
    assert greedy_ids(llm, prompts, NUM_TOKENS) == hf_ids


def test_generate_in_another_thread(
    tiny_qwen3: Path, prompts: list[Ids], hf_ids: list[Ids]
) -> None:
    results: list[list[Ids]] = []
    args = (make_paged_llm(tiny_qwen3), prompts, NUM_TOKENS)
    thread = threading.Thread(target=lambda: results.append(greedy_ids(*args)))
    thread.start()
    thread.join(timeout=STARTING)
    assert results == [hf_ids]
