"""Tests that steps get fewer threads while threads wait for cores, and all of them again after."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanovllm.utils import thread_pacing
from nanovllm.utils.thread_pacing import FIRST_PAUSE, LONGEST_PAUSE, WINDOW, ThreadPacing
from tests.helpers.faults import STARTING


class Machine:
    """Simulates cores of which `num_busy` have something else to do half of the time.

    Steps take a window each. It keeps how many threads each step has had.
    """

    def __init__(self, num_cores: int, num_busy: int = 0) -> None:
        self.num_cores = num_cores
        self.num_busy = num_busy
        self.now = 0.0
        self.seconds_waited: float | None = 0.0
        self.used: list[int] = []
        self.pacing = ThreadPacing(lambda: self.seconds_waited, lambda: self.now)

    def step(self, times: int = 1) -> int:
        """Runs steps; returns how many threads the last one had."""
        for _ in range(times):
            with self.pacing.step():
                self.used.append(torch.get_num_threads())
                self.now += WINDOW
                num_free = self.num_cores - self.num_busy
                if self.seconds_waited is not None:
                    self.seconds_waited += max(self.used[-1] - num_free, 0) * WINDOW / 2
        return self.used[-1]


@pytest.fixture(autouse=True)
def eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    assert torch.get_num_threads() == 8, "the caller's threads have changed"
    torch.set_num_threads(before)


def test_idle_cores_and_single_threads_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(8)
    machine.step(100)
    assert set(machine.used) == {8}
    assert not caplog.records
    torch.set_num_threads(1)
    single = Machine(1, num_busy=1)
    single.step(10)
    assert set(single.used) == {1}
    torch.set_num_threads(8)


@pytest.mark.parametrize("num_busy", [1, 3, 8])
def test_as_many_threads_as_cores_are_free(num_busy: int, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(8, num_busy)
    machine.step(8)
    free = max(8 - num_busy, 1)
    assert machine.used[0] == 8
    assert machine.used[-1] == free
    assert machine.used == sorted(machine.used, reverse=True)
    machine.step(1000)
    assert min(machine.used) == free
    # Few of the many steps were spent on trying more, one warning has been given, and no other.
    assert sum(used != free for used in machine.used) < 0.05 * len(machine.used)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_all_threads_come_back(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(8, num_busy=8)
    machine.step(1000)
    assert machine.step() == 1
    machine.num_busy = 0
    start = machine.now
    while machine.step() != 8:
        assert machine.now - start <= LONGEST_PAUSE + WINDOW
    machine.step(100)
    assert set(machine.used[-100:]) == {8}
    machine.num_busy = 8
    machine.step(8)
    assert machine.step() == 1
    machine.num_busy = 0
    start = machine.now
    while machine.step() != 8:
        assert machine.now - start <= FIRST_PAUSE + WINDOW, "the pause has not become short again"
    assert len(caplog.records) == 1


def test_nothing_is_done_where_the_system_does_not_count(tmp_path: Path) -> None:
    machine = Machine(8, num_busy=8)
    machine.seconds_waited = None
    machine.step(20)
    assert set(machine.used) == {8}
    machine = Machine(8, num_busy=8)
    machine.step(4)
    machine.seconds_waited = None
    assert machine.step(3) == 8


def test_a_step_that_raises_gives_the_threads_back() -> None:
    machine = Machine(8, num_busy=8)
    machine.step(8)

    def fail() -> None:
        with machine.pacing.step():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


SCRIPT = """
import os, sys, torch
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # two threads on one core
torch.set_num_threads(2)
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=64, num_kvcache_blocks=64, max_num_seqs=16)
used = []
llm._runner.sampler.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
outputs = [llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)]
while used[-1] == 2:
    outputs.append(llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False))
outputs.append(llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False))
assert all(output == outputs[0] for output in outputs), "results depend on the threads"
assert torch.get_num_threads() == 2
"""


@pytest.mark.skipif(
    thread_pacing.seconds_without_core() is None, reason="the system does not count"
)
def test_an_engine_whose_threads_share_a_core(tiny_qwen3: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tiny_qwen3)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "2"}, timeout=STARTING,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("other programs keep this CPU busy") == 1
