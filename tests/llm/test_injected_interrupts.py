"""Raises at many places within the engine's own code, as a signal handler that raises may, and
checks after each that all other requests get their exact ids and nothing is lost or held."""

import linecache
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.helpers import ROOT
from tests.helpers.engines import GREEDY, Ids, joined, make_paged_llm
from tests.helpers.faults import StepError

CODE = str(ROOT / "nanovllm")
# Kernels and layers are left out: in them a step fails as it does for any reason.
PARTS = ("engine/", "llm.py")
NUM_PLACES = 10
LOGPROBS = replace(GREEDY, logprobs=1, prompt_logprobs=1)
STOPPING = SamplingParams(max_tokens=12, n=2, seed=5, stop=["\ufffe never"])
SAMPLED = SamplingParams(max_tokens=9, seed=3)


@contextmanager
def raising_at(number: int) -> Iterator[list[str]]:
    """Raises `StepError` at the `number`-th line of the engine's code that runs from now on, in
    this thread; yields a list of the lines that ran."""
    lines: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(CODE) or not name[len(CODE) + 1 :].startswith(PARTS):
            return None
        if event == "line":
            lines.append(f"{name}:{frame.f_lineno}")
            # At `try`, and at the end of `with`, whose line comes again, Python runs no handler.
            line = linecache.getline(name, frame.f_lineno).lstrip()
            if len(lines) >= number > 0 and not line.startswith(("with ", "try:")):
                sys.settrace(None)
                raise StepError
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(previous)


def stream(llm: LLM) -> None:
    list(llm.stream([[1, 2, 3], [4] * 9], [STOPPING, SAMPLED]))


def generate(llm: LLM) -> None:
    llm.generate([[1, 2, 3], [7] * 9], [LOGPROBS, STOPPING], use_tqdm=False)


def step(llm: LLM) -> None:
    for _ in range(6):
        llm.step()


def abort(llm: LLM) -> None:
    seq_id = llm.add_request([9] * 6, GREEDY)
    llm.step()
    llm.abort(seq_id)


def results(llm: LLM) -> dict[str, Any]:
    """Returns what the engine makes of requests of all kinds, after whatever has happened."""
    outputs = llm.generate(
        [[5, 6, 7], [8] * 20, [5, 6, 7, 8]], [GREEDY, LOGPROBS, STOPPING], use_tqdm=False
    )
    streamed = joined(llm.stream([5, 6, 7], STOPPING))
    return {"outputs": [[o["token_ids"], o["text"]] for o in outputs], "streamed": streamed}


def drained(llm: LLM) -> dict[int, Ids]:
    ids: dict[int, Ids] = {}
    while not llm.is_finished():
        ids.update(llm.step()[0])
    return ids


@pytest.mark.parametrize("use", [generate, stream, step, abort])
def test_whatever_is_cut_short_harms_no_other_request(
    use: Callable[[LLM], None], tiny_qwen3: Path
) -> None:
    llm = make_paged_llm(tiny_qwen3, num_kvcache_blocks=32)
    expected = results(llm)
    rng = random.Random(use.__name__)
    alone: list[Ids] | None = None
    num_lines = 0
    for place in range(NUM_PLACES):
        kept = [llm.add_request([5, 6, 7], GREEDY), llm.add_request([8] * 20, LOGPROBS)]
        llm.step()
        number = rng.randint(1, num_lines) if place else 0
        lines: list[str] = []
        try:
            with raising_at(number) as lines:
                use(llm)
        except StepError:
            pass
        num_lines = num_lines or len(lines)
        where = lines[-1]
        assert not llm._turns.is_inside, where
        ids = drained(llm)
        if alone is None:
            alone = [ids[i] for i in kept]
        for seq_id, own in zip(kept, alone, strict=True):
            # What a call of step was about to return is lost with it.
            assert ids.get(seq_id, own if use is step else None) == own, where
        assert results(llm) == expected, where
        assert llm.scheduler.num_residents == 0, where
        llm.scheduler.block_manager.check_integrity([])


def test_alarms_that_raise_at_any_time(tiny_qwen3: Path) -> None:
    """As a user's time limit for a call does."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise StepError

    llm = make_paged_llm(tiny_qwen3, num_kvcache_blocks=32)
    expected, num_rung = results(llm), 0
    long = replace(GREEDY, max_tokens=40)
    previous = signal.signal(signal.SIGALRM, ring)
    try:
        for seconds in (0.001, 0.005, 0.01, 0.02, 0.03, 0.05):
            kept = llm.add_request([5, 6, 7], GREEDY)
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                llm.generate([[1, 2, 3], [7] * 9], [long, STOPPING], use_tqdm=False)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except StepError:
                num_rung += 1
            assert drained(llm)[kept] == expected["outputs"][0][0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_rung
    assert results(llm) == expected
    llm.scheduler.block_manager.check_integrity([])
