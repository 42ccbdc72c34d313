"""Tests that a user's script on two ranks leaves no process and no directory, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers import ROOT
from tests.helpers.faults import SOON, STARTING, until
from tests.helpers.ranks import WORKER

SCRIPT = ROOT / "tests" / "helpers" / "parallel_script.py"
UNGUARDED = """
import sys
from nanovllm import LLM
print("starting", flush=True)
llm = LLM(sys.argv[1], device="cpu", max_model_len=64, tensor_parallel_size=2)
"""
Run = Callable[..., "Script"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)]


class Script:
    """Runs a script in a process session of its own, as in a terminal."""

    def __init__(self, args: list[str], directory: Path) -> None:
        self.directory = directory
        self.log = directory / "stderr"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *args],
                env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                start_new_session=True,
            )

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().rstrip() == line, self.log.read_text()

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if WORKER in " ".join(child.cmdline())]

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def check_gone(self) -> str:
        """Waits for the script's end, checks that no process or directory is left soon after it,
        and returns what the script wrote to stderr."""
        self.process.wait(SOON)
        until(lambda: not self.session(), SOON)
        assert not list(self.directory.glob("nanovllm-*"))
        return self.log.read_text()

    def check_interrupted(self) -> str:
        """Checks as `check_gone` does, and that an uncaught KeyboardInterrupt ended the script."""
        errors = self.check_gone()
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        assert self.process.returncode == -signal.SIGINT, errors
        return errors

    def session(self) -> list[int]:
        """Returns the running processes of the session. Zombies, which only wait to be reaped by
        their parents, do not count."""
        return [p.pid for p in psutil.process_iter() if session_of(p) == self.process.pid]


def session_of(process: psutil.Process) -> int | None:
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return None if is_zombie else os.getsid(process.pid)
    except (OSError, psutil.Error):
        return None


@pytest.fixture
def run(tiny_qwen3: Path, tmp_path: Path) -> Iterator[Run]:
    """Provides a function that starts the script on the tiny model."""
    scripts: list[Script] = []

    def start(what: str = "", script: str | Path = SCRIPT, device: str = "cpu") -> Script:
        args = [*str(script).split("\0"), str(tiny_qwen3), what, device]
        scripts.append(Script(args, tmp_path))
        return scripts[-1]

    yield start
    for script in scripts:
        for pid in script.session():
            os.kill(pid, signal.SIGKILL)
        script.process.wait()


def start(run: Run, what: str, device: str = "cpu") -> Script:
    """Starts the script and returns when it is about to do `what`."""
    script = run(what, device=device)
    for line in ("starting", "ready"):
        script.wait_for(line)
    return script


def start_loading(run: Run, seconds: float) -> Script:
    """Starts the script and returns `seconds` after its workers began; if loading takes less, the
    script sleeps by then."""
    script = run("sleep")
    script.wait_for("starting")
    until(script.workers, STARTING)
    time.sleep(seconds)
    return script


@pytest.mark.parametrize("has_file", [False, True])
def test_needs_no_guard_and_no_exit(has_file: bool, run: Run, tmp_path: Path) -> None:
    """The workers never import the script, so it may lie on stdin, in a notebook or nowhere."""
    path = tmp_path / "unguarded.py"
    path.write_text(UNGUARDED)
    script = run(script=path if has_file else f"-c\0{UNGUARDED}")
    output, _ = script.process.communicate(timeout=STARTING)
    assert output.splitlines() == ["starting"]
    assert script.check_gone() == ""
    assert script.process.returncode == 0


@pytest.mark.parametrize("seconds", [0, 1.2])
def test_ctrl_c_while_loading(run: Run, seconds: float) -> None:
    script = start_loading(run, seconds)
    script.ctrl_c()
    errors = script.check_interrupted()
    assert errors.count("Traceback (most recent call last)") == 1, "workers have nothing to say"


@pytest.mark.parametrize("device", DEVICES)
def test_ctrl_c_in_generate(run: Run, device: str) -> None:
    script = start(run, "generate", device)
    script.ctrl_c()
    errors = script.check_interrupted()
    assert errors.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("is_stopped", [False, True])
def test_ctrl_c_while_idle(run: Run, is_stopped: bool) -> None:
    script = start(run, "sleep")
    if is_stopped:  # this worker does not end by itself
        script.workers()[0].suspend()
    script.ctrl_c()
    script.check_interrupted()


@pytest.mark.parametrize("device", DEVICES)
def test_second_ctrl_c_where_a_step_hangs(run: Run, device: str) -> None:
    """The first Ctrl-C waits for the end of the step, so only the second one ends the script."""
    script = start(run, "generate", device)
    (worker,) = script.workers()
    worker.suspend()
    # On GPUs, the work in the queues ends first, and then one GPU waits for the other.
    for _ in range(2):
        time.sleep(2)
        assert script.process.poll() is None
        script.ctrl_c()
    script.check_interrupted()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", ["generate", "sleep"])
def test_parent_killed(run: Run, what: str, device: str) -> None:
    script = start(run, what, device)
    script.process.kill()
    script.check_gone()


def test_parent_killed_while_loading(run: Run) -> None:
    script = start_loading(run, 0.5)
    script.process.kill()
    script.check_gone()
