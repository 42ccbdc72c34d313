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
IN_A_POOL = """
import multiprocessing, sys
from nanovllm import LLM, SamplingParams
def work(model):
    global llm
    llm = LLM(model, device="cpu", max_model_len=64, tensor_parallel_size=2)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    return len(llm.generate([[1, 2]], params, use_tqdm=False)[0]["token_ids"])
multiprocessing.set_start_method("fork")
print("starting", flush=True)
with multiprocessing.Pool(1) as pool:
    print("ready", pool.apply(work, sys.argv[1:2]), flush=True)
"""
Run = Callable[..., "Script"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)]


class Script:
    """Runs a script in a process session of its own, as in a terminal."""

    def __init__(self, args: list[str], directory: Path, stdin: str | None) -> None:
        self.directory = directory
        self.log = directory / "stderr"
        source = directory / "stdin"
        source.write_text(stdin or "")
        with self.log.open("w") as log, source.open() as read:
            self.process = subprocess.Popen(
                [sys.executable, *args],
                env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
                stdin=read,
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

    def start(
        what: str = "",
        script: str | Path = SCRIPT,
        device: str = "cpu",
        stdin: str | None = None,
    ) -> Script:
        args = [str(script), str(tiny_qwen3), what, device]
        scripts.append(Script(args, tmp_path, stdin))
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


def test_needs_no_guard_and_no_exit(run: Run, tmp_path: Path) -> None:
    """The workers never import the script again."""
    path = tmp_path / "unguarded.py"
    path.write_text(UNGUARDED)
    script = run(script=path)
    output, _ = script.process.communicate(timeout=STARTING)
    assert output.splitlines() == ["starting"]
    assert script.check_gone() == ""
    assert script.process.returncode == 0


def test_needs_no_file_no_start_method_and_may_start_in_a_daemonic_process(run: Run) -> None:
    """The script comes from stdin, sets a start method, and makes the engine in a pool's process,
    which may have no children by multiprocessing, and which the pool ends by a signal."""
    script = run(script="-", stdin=IN_A_POOL)
    output, _ = script.process.communicate(timeout=STARTING)
    assert output.splitlines() == ["starting", "ready 5"], script.log.read_text()
    script.check_gone()
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
