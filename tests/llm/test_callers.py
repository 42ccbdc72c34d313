"""Tests that one engine serves several threads at once, and engines made at once do not mix."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine.turns import SLEEP_SECONDS, Caller, Turns
from tests.helpers.engines import GREEDY, Ids, greedy_ids, joined, make_llm, make_paged_llm
from tests.helpers.faults import SOON, StepError, at_call, fail

LONG = replace(GREEDY, max_tokens=50)
NUM_THREADS = 8


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3)


def ids_of(llm: LLM, prompt: Ids, **params: Any) -> Ids:
    outputs = llm.generate([prompt], replace(GREEDY, **params), use_tqdm=False)
    return outputs[0]["token_ids"]


def streamed_ids(llm: LLM, prompt: Ids) -> Ids:
    return joined(llm.stream([prompt], GREEDY))[0, 0][1]


def chat_text(llm: LLM, prompt: Ids) -> Ids:
    """Returns what a text's completion is, by a call that tokenizes in this thread."""
    return llm.generate([{"prompt": "a text"}], GREEDY, use_tqdm=False)[0]["token_ids"]


def count_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    step = llm._step
    monkeypatch.setattr(llm, "_step", lambda: (steps.append(1), step())[1])
    return steps


def in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """Runs a call in a thread that does not keep the test's process alive should it hang."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until_running(llm: LLM, num_requests: int) -> None:
    deadline = time.monotonic() + SOON
    while llm.scheduler.num_residents < num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_calls_of_all_kinds_share_steps(
    llm: LLM, ragged_prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt[:40] for prompt in ragged_prompts[:24]]
    expected = [greedy_ids(llm, [prompt], GREEDY.max_tokens)[0] for prompt in prompts]
    text_ids = chat_text(llm, [])
    steps = count_steps(llm, monkeypatch)
    added = llm.add_request(prompts[0], GREEDY)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        # The first calls of all threads start together.
        barrier = threading.Barrier(NUM_THREADS)

        def call(index: int) -> tuple[Ids, Ids]:
            if index < NUM_THREADS:
                barrier.wait(SOON)
            use = (ids_of, streamed_ids)[index % 2]
            return use(llm, prompts[index]), chat_text(llm, []) if index % 5 == 0 else text_ids

        got = list(pool.map(call, range(len(prompts))))
    assert got == [(ids, text_ids) for ids in expected]
    # In turns they would take 29 calls of 13 steps each; threads that start late share less.
    assert len(steps) < 29 * 13 / 2
    ((seq_id, ids),) = llm.step()[0] if not llm.is_finished() else [(added, expected[0])]
    assert (seq_id, ids) == (added, expected[0])
    assert llm.is_finished()
    llm.scheduler.block_manager.check_integrity([])


def test_asyncio_threads(llm: LLM) -> None:
    async def gathered() -> list[Ids]:
        calls = (asyncio.to_thread(ids_of, llm, [i, i + 1, 7]) for i in range(2, 8))
        return list(await asyncio.gather(*calls))

    assert asyncio.run(gathered()) == [ids_of(llm, [i, i + 1, 7]) for i in range(2, 8)]


def test_a_short_call_does_not_wait_for_a_long_one(llm: LLM) -> None:
    long = in_thread(lambda: ids_of(llm, [5, 6, 7], max_tokens=50))
    wait_until_running(llm, 1)
    short = in_thread(lambda: ids_of(llm, [8, 9], max_tokens=2))
    assert short.result(SOON) == ids_of(llm, [8, 9], max_tokens=2)
    assert len(long.result(SOON)) == 50


def test_a_step_that_fails_in_one_call_leaves_the_others(llm: LLM) -> None:
    """Whoever drives gets the error, the other call its ids."""
    assert llm._runner is not None
    prompts = [5, 6, 7], [8, 9, 10, 11]
    expected = {tuple(ids_of(llm, prompt, max_tokens=50)) for prompt in prompts}
    barrier = threading.Barrier(2)

    def call(prompt: Ids) -> Ids:
        barrier.wait(SOON)
        return ids_of(llm, prompt, max_tokens=50)

    calls = [in_thread(lambda prompt=prompt: call(prompt)) for prompt in prompts]
    wait_until_running(llm, 2)
    at_call(llm._runner.model, 3, fail)  # type: ignore[arg-type]
    errors = [future.exception(SOON) for future in calls]
    assert [type(error) for error in errors if error] == [StepError]
    assert {
        tuple(f.result()) for f, error in zip(calls, errors, strict=True) if not error
    } < expected
    assert llm.is_finished()


def test_exit_ends_the_calls_of_other_threads_at_once(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    stream = llm.stream([3, 4], LONG)
    next(stream)
    calls = [in_thread(lambda i=i: ids_of(llm, [5, i], max_tokens=60)) for i in range(3)]
    wait_until_running(llm, 4)
    with pytest.raises(RuntimeError, match="requests still run on the old weights"):
        llm.update_weights([])
    llm.exit()
    for call in calls:
        assert "closed by exit()" in str(call.exception(SOON))
    assert [delta["finish_reason"] for delta in stream][-1] == "abort"


def test_abort_and_close_by_another_thread(llm: LLM) -> None:
    stream = llm.stream([3, 4], LONG)
    next(stream)
    seq_id = llm.add_request([5, 6], LONG)
    own = in_thread(lambda: ids_of(llm, [8, 9], max_tokens=50))
    in_thread(lambda: llm.abort(seq_id)).result(SOON)
    in_thread(stream.close).result(SOON)
    assert own.result(SOON) == ids_of(llm, [8, 9], max_tokens=50)
    assert llm.is_finished()
    # A request of generate that somebody aborts ends that call.
    call = in_thread(lambda: ids_of(llm, [8, 9], max_tokens=50))
    wait_until_running(llm, 1)
    llm.abort(llm._requests.num_sequences - 1)
    error = call.exception(SOON)
    assert error is None or "has been aborted" in str(error)


def test_what_interrupts_a_step_of_its_own_thread(llm: LLM) -> None:
    """A finalizer may end a stream in the middle of a step; anything that would need a step of its
    own is refused."""
    assert llm._runner is not None
    stream = llm.stream([3, 4], LONG)
    next(stream)
    itself = {"stream": stream}
    itself["itself"] = itself  # type: ignore[assignment]
    del stream
    itself = {}
    seen: list[str] = []

    def interrupt() -> None:
        gc.collect()
        with pytest.raises(RuntimeError, match=r"may only call abort\(\) and exit\(\)") as error:
            llm.generate([[1, 2]])
        seen.append(str(error.value))

    at_call(llm._runner.model, 2, interrupt)  # type: ignore[arg-type]
    assert len(ids_of(llm, [5, 6, 7])) == GREEDY.max_tokens
    assert seen
    assert llm.is_finished()


def test_exit_within_a_step(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    assert llm._runner is not None
    at_call(llm._runner.model, 2, llm.exit)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"closed by exit\(\)"):
        ids_of(llm, [5, 6, 7])
    assert llm._runner is None


def test_engines_made_at_once_in_threads(tiny_qwen3: Path) -> None:
    before = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    dtypes = ["float32", "bfloat16"] * 2
    alone = {d: ids_of(make_llm(tiny_qwen3, dtype=d), [5, 6, 7]) for d in set(dtypes)}
    seen: set[torch.dtype] = set()
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            seen.add(torch.get_default_dtype())

    watcher = in_thread(watch)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda d: ids_of(make_llm(tiny_qwen3, dtype=d), [5, 6, 7]), dtypes))
    is_done.set()
    watcher.result(SOON)
    assert made == [alone[d] for d in dtypes]
    assert seen == {torch.float32}
    after = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    assert after == before


def test_a_driver_that_never_leaves_is_replaced() -> None:
    """As when an exception has hit the code that would have left."""
    turns, dead, alive = Turns(), Caller(), Caller()
    assert turns.may_drive(dead)
    assert not turns.may_drive(alive)
    start = time.monotonic()
    while not turns.may_drive(alive):
        turns.sleep(alive)
    assert time.monotonic() - start >= SLEEP_SECONDS / 2
