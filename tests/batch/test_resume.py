"""Tests that a job survives kills and full disks, and a lost engine."""

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.batch.engine_processes import EngineProcesses
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
    output, limit = tmp_path / "out.jsonl", len(undisturbed) // 2

    def little_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    job = start_job(source, output, tiny_qwen3, *OPTIONS, preexec_fn=little_space)
    text, _ = job.communicate(timeout=STARTING)
    assert job.returncode == 1, text
    assert "File too large" in text
    half = output.read_bytes()
    assert half.endswith(b"\n")
    assert undisturbed.startswith(half)
    assert run_job(source, output, tiny_qwen3, *OPTIONS) == 0
    assert output.read_bytes() == undisturbed


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
