"""Tests the jobs of benchmarks/workloads.py, their floors, and a run of all of them."""

from pathlib import Path

import pytest

from benchmarks import workloads
from benchmarks.roofline import Rates, Shape, floor
from benchmarks.workloads import JOBS, Job

SHAPE = Shape(2, 64, 4, 2, 16, 128, 1000, itemsize=2)
RATES = Rates(bandwidth=1e9, flops=1e12)


def test_prompts_share_what_the_job_says() -> None:
    job = Job(8, (3, 5), (2, 9), prefix_len=4, num_prefixes=2)
    prompts = job.prompts(0, vocab_size=500)
    assert [len(prompt) - 4 for prompt in prompts] == [own for own, _ in job.lengths()]
    assert len({tuple(prompt[:4]) for prompt in prompts[:4]}) == 1
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 2
    assert prompts != job.prompts(1, vocab_size=500)
    assert max(map(max, prompts)) < 500


def test_a_floor_counts_a_shared_prefix_once() -> None:
    shared = Job(8, (10, 10), (5, 5), prefix_len=100, num_prefixes=1)
    least = shared.floor(SHAPE, RATES, max_num_seqs=8)
    apart = floor(SHAPE, [(110, 5)] * 8, RATES, max_num_seqs=8)
    own = floor(SHAPE, [(10, 5)] * 8, RATES, max_num_seqs=8)
    token = SHAPE.kv_bytes_per_token
    assert least.kv_bytes == own.kv_bytes + 4 * 100 * token
    assert apart.kv_bytes == own.kv_bytes + 4 * 8 * 100 * token
    # One sequence alone shares nothing, so that both count the same.
    alone = Job(1, (10, 10), (5, 5), prefix_len=100, num_prefixes=1)
    least, expected = alone.floor(SHAPE, RATES, 8), floor(SHAPE, [(110, 5)], RATES, 8)
    assert (least.kv_bytes, least.prefill_flops) == (expected.kv_bytes, expected.prefill_flops)
    assert least.seconds == pytest.approx(expected.seconds)


def test_all_jobs_run(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--runs", "1", "--scale", "0.01", "--max-model-len", "512", "--max-num-seqs", "16"]
    workloads.main(["--model", str(tiny_qwen3), *options])
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if "; floor" in line] == list(JOBS)


def test_an_unknown_job_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        workloads.main(["--model", "x", "--jobs", "bench,few"])
    assert "unknown jobs few" in capsys.readouterr().err
