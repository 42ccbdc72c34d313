"""Tests that a job survives kills and full disks, and a lost engine."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.batch.engine_processes import EngineProcesses
from nanovllm.batch.files import LineFile
from nanovllm.batch.requests import Request
from tests.batch.jobs import read_rows, run_job, start_job, write_rows
from tests.helpers.engines import make_llm
from tests.helpers.faults import STARTING, until

NUM_ROWS = 60
NUM_KILLS = int(os.environ.get("NANOVLLM_TEST_KILLS", "3"))
OPTIONS = ("--max-tokens=24", "--ignore-eos")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(1)
    rows = [
        {"id": i, "prompt": [rng.randrange(2, 512) for _ in range(rng.randint(1, 60))]}
        for i in range(NUM_ROWS)
    ]
    return write_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def undisturbed(source: Path, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    output = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    assert run_job(source, output, tiny_qwen3, *OPTIONS) == 0
    return output.read_bytes()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_kills_lose_nothing(
    source: Path, undisturbed: bytes, tiny_qwen3: Path, tmp_path: Path
) -> None:
    output, rng = tmp_path / "out.jsonl", random.Random(2)
    marks = sorted(rng.sample(range(1, NUM_ROWS - 10), min(NUM_KILLS, NUM_ROWS - 12)))
    for mark in marks:
        job = start_job(source, output, tiny_qwen3, *OPTIONS)
        until(lambda: num_lines(output) >= mark or job.poll() is not None, STARTING)  # noqa: B023
        time.sleep(rng.random() / 50)
        job.kill()
        job.communicate()
        if output.exists():
            assert undisturbed.startswith(output.read_bytes())
    assert run_job(source, output, tiny_qwen3, *OPTIONS) == 0
    assert output.read_bytes() == undisturbed
    assert [row["id"] for row in read_rows(output)] == list(range(NUM_ROWS))


def test_a_full_disk_is_an_error_and_the_job_goes_on_later(
    source: Path, undisturbed: bytes, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """The job writes to a full disk where this machine lets us make a small one, and elsewhere to a
    file that may not grow."""
    output, limit = tmp_path / "out.jsonl", len(undisturbed) // 2
    disk, message = tmp_path / "disk", "File too large"
    options: dict[str, Any] = {}
    disk.mkdir()
    if has_disks(disk):
        message, options = "No space left on device", {"under": on_a_disk(disk)}
    else:
        options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    target = disk / "out.jsonl" if "under" in options else output
    job = start_job(source, target, tiny_qwen3, *OPTIONS, **options)
    text, _ = job.communicate(timeout=STARTING)
    assert job.returncode == 1, text
    assert message in text
    half = output.read_bytes()
    assert half.endswith(b"\n")
    assert half != undisturbed
    assert undisturbed.startswith(half)
    assert run_job(source, output, tiny_qwen3, *OPTIONS) == 0
    assert output.read_bytes() == undisturbed


def on_a_disk(folder: Path) -> list[str]:
    """Returns a command that runs another with a disk of 16 KiB in a folder, and then copies what
    is on it to the folder above."""
    script = """
        mount -t tmpfs -o size=16k tmpfs "$0" || exit 99
        "$@"
        code=$?
        cp "$0"/* "$0"/..
        exit $code
    """
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*namespace, "sh", "-c", script, str(folder)]


def has_disks(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*on_a_disk(folder), "touch", str(folder / "any")]
    return not subprocess.run(command, capture_output=True).returncode


def test_half_a_record_of_a_job_that_wrote_nothing_is_replaced(
    source: Path, undisturbed: bytes, tiny_qwen3: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.job").write_text('{"inp')
    assert run_job(source, output, tiny_qwen3, *OPTIONS) == 0
    assert output.read_bytes() == undisturbed


def test_the_record_of_a_job_is_not_written_again(
    source: Path, undisturbed: bytes, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """On a full disk it could not be: resuming would lose what the output belongs to."""
    output, record = tmp_path / "out.jsonl", tmp_path / "out.jsonl.job"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LineFile, "append", interrupted_after(LineFile.append))
        assert run_job(source, output, tiny_qwen3, *OPTIONS) == 130
    before = record.stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LineFile, "append", interrupted_after(LineFile.append))
        assert run_job(source, output, tiny_qwen3, *OPTIONS) == 130
    assert record.stat().st_mtime_ns == before
    assert run_job(source, output, tiny_qwen3, *OPTIONS) == 0
    assert output.read_bytes() == undisturbed


def interrupted_after(append: Callable[[LineFile, list[bytes]], None]) -> Callable[..., None]:
    """Returns a method that appends, and then does as if Ctrl-C had been pressed."""

    def interrupted(lines: LineFile, data: list[bytes]) -> None:
        append(lines, data)
        raise KeyboardInterrupt

    return interrupted


def test_two_processes_do_not_write_one_output(
    source: Path, tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    job = start_job(source, output, tiny_qwen3, *OPTIONS)
    try:
        until(lambda: output.exists() or job.poll() is not None, STARTING)
        os.kill(job.pid, signal.SIGSTOP)
        assert run_job(source, output, tiny_qwen3, *OPTIONS) == 2
        assert "another process" in capsys.readouterr().err
    finally:
        job.kill()
        job.communicate()


def test_the_rows_of_a_lost_engine_go_to_the_others(tiny_qwen3: Path) -> None:
    keywords = {"model": str(tiny_qwen3), "device": "cpu", "max_model_len": 128}
    keywords |= {"max_num_seqs": 8, "num_kvcache_blocks": 16}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[2 + i, 3, 5] for i in range(40)]
    with make_llm(tiny_qwen3) as llm:
        expected = [output["token_ids"] for output in llm.generate(prompts, params, False)]
    engines = EngineProcesses(keywords, [None, None])
    try:
        for index, prompt in enumerate(prompts):
            engines.submit(index, Request(params, prompt))
        os.kill(engines._workers[0]._process.pid or 0, signal.SIGKILL)
        answers: dict[int, Any] = {}
        while engines.num_pending:
            for index, answer in engines.poll():
                assert index not in answers, "answered twice"
                answers[index] = answer
    finally:
        engines.exit()
    assert [answers[i]["token_ids"] for i in range(len(prompts))] == expected
