"""Tests what bench.py measures beside throughput, and the scripts in benchmarks/."""

import gzip
import json
import re
import timeit
from pathlib import Path
from statistics import median

import pytest
import torch

import bench
from benchmarks import decode_steps, growth
from benchmarks.decode_steps import context_lens
from benchmarks.phases import Mark, split
from benchmarks.profiling import Activity, Row, busy_ms, rows_of
from benchmarks.roofline import Rates, Shape, floor, num_decode_steps, si
from tests.helpers import ROOT
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_llm

QWEN3_0_6B = Shape(
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    itemsize=2,
)


def test_floor_of_the_default_workload() -> None:
    workload = bench.make_workload(256, (100, 1024), (100, 1024), vocab_size=151936, seed=0)
    lengths = [(len(prompt), max_tokens) for prompt, max_tokens in workload]
    least = floor(QWEN3_0_6B, lengths, Rates(bandwidth=4.3e12, flops=790e12), max_num_seqs=512)
    assert QWEN3_0_6B.kv_bytes_per_token == 112 * 1024
    assert least.kv_bytes == pytest.approx(13.85e12, rel=1e-3)
    assert least.decode_steps == 1023
    assert least.prefill_flops == pytest.approx(137e12, rel=5e-3)
    parts = (least.kv_seconds, least.weight_seconds, least.prefill_seconds)
    assert parts == pytest.approx((3.22, 0.28, 0.17), abs=0.005)
    assert least.seconds == pytest.approx(3.70, rel=0.01)


def test_floor_counts_what_the_steps_read_and_compute() -> None:
    shape = Shape(2, 8, 4, 2, 4, 16, 32, itemsize=4)
    lengths = [(3, 4), (2, 1), (1, 2)]
    least = floor(shape, lengths, Rates(bandwidth=1, flops=1), max_num_seqs=8)
    kv_per_token = 2 * 2 * 2 * 4 * 4  # layers, K and V, heads, head_dim, bytes per number
    assert least.kv_bytes == (4 + 5 + 6 + 2) * kv_per_token
    per_layer = 8 * (4 + 2 + 2) * 4 + (4 * 4) * 8 + 3 * 8 * 16
    assert least.weight_bytes == 3 * (2 * per_layer + 8 * 32) * 4
    queries_times_keys = (1 + 2 + 3) + (1 + 2) + 1
    # For scores and for values: 2 flops per head, dimension and layer.
    attention = 2 * 2 * queries_times_keys * 4 * 4 * 2
    assert least.prefill_flops == 2 * (2 * per_layer * 6 + 8 * 32 * 3) + attention
    assert least.seconds == least.kv_bytes + least.weight_bytes + least.prefill_flops


@pytest.mark.parametrize(
    ("output_lens", "max_num_seqs", "expected"),
    [
        ([5, 3, 8], 3, 7),
        ([5, 3, 8], 99, 7),
        ([3, 3, 3], 1, 6),
        ([5, 2, 4], 2, 4),  # the third sequence takes the row of the second
        ([1, 1], 1, 0),  # the prefill samples the only token
    ],
)
def test_decode_steps(output_lens: list[int], max_num_seqs: int, expected: int) -> None:
    assert num_decode_steps(output_lens, max_num_seqs) == expected


def test_si() -> None:
    assert [si(value, "B/s") for value in (12, 4.2813e12, 1.5e18)] == [
        "12 B/s",
        "4.281 TB/s",
        "1500 PB/s",
    ]


def test_a_steps_time_is_that_between_completions() -> None:
    marks = [(1,), (1.5,), (3, 100), (4, 0, 2), (4.5,), (6, 0, 5), (7, 7, 5), (10, 0, 300)]
    phases = split([Mark(*mark) for mark in marks], seconds=9.25)
    assert phases == {
        "prefill_seconds": 2 + 1,
        "prefill_steps": 2,
        "decode_seconds": 1 + 2 + 3,
        "decode_steps": 3,
        "other_seconds": 0.25,
        "decode_bands": [
            {"batch": "1-4", "steps": 1, "mean_ms": 1000},
            {"batch": "5-16", "steps": 1, "mean_ms": 2000},
            {"batch": ">256", "steps": 1, "mean_ms": 3000},
        ],
    }


def test_busy_time_counts_overlaps_once_and_tables_add_up() -> None:
    spans = [("a", 4000, 6000), ("b", 0, 1000), ("a", 500, 2000), ("c", 600, 700)]
    activities = [Activity(name, start, end, end - start) for name, start, end in spans]
    assert busy_ms(activities) == 2 + 2
    assert rows_of(activities, num_steps=2) == [
        Row("a", 1.75, 1.0),
        Row("b", 0.5, 0.5),
        Row("c", 0.05, 0.5),
    ]


@pytest.mark.parametrize(("batch", "mean"), decode_steps.DECODE_CASES)
def test_context_lens_have_their_mean(batch: int, mean: int) -> None:
    lens = context_lens(batch, mean)
    assert len(lens) == batch
    assert lens.mean() == pytest.approx(mean, abs=1)
    assert (lens >= mean // 2).all()


@pytest.mark.alone
def test_bench_measures_all_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, trace, path = tmp_path / "model", tmp_path / "trace.json.gz", tmp_path / "result.json"
    make_checkpoint(model)
    monkeypatch.setattr(decode_steps, "DECODE_CASES", ((16, 60), (6, 40), (6, 990), (8, 200)))
    options = "--num-seqs 9 --min-input-len 3 --max-input-len 40 --min-output-len 2"
    options += " --max-output-len 20 --runs 2 --max-model-len 1024 --max-num-seqs 8"
    options += " --kvcache-block-size 16 --num-kvcache-blocks 64 --roofline --profile-decode"
    files = ["--profile", str(trace), "--json", str(path)]
    bench.main(["--model", str(model), *options.split(), *files])
    out = capsys.readouterr().out

    result = json.loads(path.read_text())
    for run in result["runs"]:
        phases = run["phases"]
        parts = [phases[f"{part}_seconds"] for part in ("prefill", "decode", "other")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(run["seconds"])
        assert phases["prefill_steps"] >= 2, "nine requests on eight rows"
        num_steps = phases["prefill_steps"] + phases["decode_steps"]
        assert num_steps >= result["roofline"]["floor"]["decode_steps"]
        assert sum(band["steps"] for band in phases["decode_bands"]) == phases["decode_steps"]
        assert {band["batch"] for band in phases["decode_bands"]} <= {"1-4", "5-16"}
    assert re.search(r"^Run 1: prefill \d+\.\d+s in \d+ steps, decode \d+\.\d+s in \d+", out, re.M)

    roofline = result["roofline"]
    assert roofline["rates"]["bandwidth"] > 1e6
    assert roofline["rates"]["flops"] > 1e6
    assert roofline["floor_output_tokens_per_second"] * roofline["floor_seconds"] == pytest.approx(
        result["runs"][0]["output_tokens"]
    )
    assert re.search(r"^  floor +\d+\.\d+s  \d+\.\d\dtok/s$", out, re.M)
    assert re.search(r"^  run 1 +\d+\.\d+s  \d+\.\d\dtok/s, \d+\.\d% of the floor's", out, re.M)
    assert result["shape"]["num_layers"] == 2

    assert "batch 16, mean context 60: skipped, max_num_seqs is 8" in out
    assert "batch 6, mean context 990: skipped, its longest takes 1518 tokens, max_model" in out
    assert "batch 8, mean context 200: skipped, it takes 168 blocks, the pool has 64" in out
    (step,) = result["decode_steps"]
    assert (step["batch"], step["context"]) == (6, 40)
    assert 0 < step["host_ms"] <= step["wall_ms"]
    assert step["kernels"][0]["ms"] > 0
    assert re.search(r"^Decode step, batch 6, mean context 40: wall \d+\.\d{3}ms, busy", out, re.M)
    kernels = own_kernels() if torch.cuda.is_available() else ["aten::"]
    assert any(kernel in row["name"] for kernel in kernels for row in step["kernels"])
    assert any(kernel in out for kernel in kernels)
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def own_kernels() -> list[str]:
    """Returns the names of the package's Triton kernels, as profilers list them."""
    paths = (ROOT / "nanovllm" / "kernels").glob("*.py")
    source = "\n".join(path.read_text() for path in paths)
    return re.findall(r"^def (_\w+_kernel)\(", source, re.M)


def test_the_packages_kernels_are_known_by_name() -> None:
    assert {"_decode_kernel", "_prefill_kernel"} <= set(own_kernels())


def test_decode_steps_of_two_ranks(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_steps, "DECODE_CASES", ((6, 40),))
    with make_llm(tiny_qwen3, max_num_seqs=8, tensor_parallel_size=2) as llm:
        (step,) = decode_steps.profile_decode(llm, temperature=0.6)
    assert step.wall_ms > 0
    assert step.kernels


@pytest.mark.parametrize("option", ["--json", "--profile"])
def test_bench_needs_a_directory_for_its_files(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args([option, str(tmp_path / "nowhere" / "file")])
    assert f"{option} {tmp_path}" in capsys.readouterr().err


def test_the_hosts_work_grows_with_neither_queue_nor_pool() -> None:
    """If the host's work per step were proportional to the queue or the pool, it would take
    thousands of times as long."""
    sizes = [(10, growth.SMALL_POOL), (20_000, growth.SMALL_POOL), (10, growth.HUGE_POOL)]
    loops = [growth.HostLoop(*size) for size in sizes]
    # The loops take turns and medians are compared, so that other load on the machine affects all.
    few, long_queue, huge_pool = growth.step_seconds(loops, num_rounds=20)
    assert long_queue < 20 * few
    assert huge_pool < 20 * few


def test_queueing_a_prompt_is_cheap() -> None:
    """Queueing a prompt takes a few times as long as a loop over its ids, whatever the machine."""
    times = timeit.repeat("[i + 1 for i in ids]", globals={"ids": list(range(500))}, number=100)
    _, typical = growth.add_request_seconds(2_000, num_batches=20)
    assert typical < 30 * median(times) / 100


def test_growth_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    growth.main(["--rounds", "2", "--waiting", "100", "--pool", "1000", "--prompts", "200"])
    out = capsys.readouterr().out
    assert re.search(r"^step with 10 and 100 waiting prompts: .*us, ratio \d+\.\d\d$", out, re.M)
    assert re.search(r"^step with 128 and 1,000 K/V blocks: .*us, ratio \d+\.\d\d$", out, re.M)
    assert re.search(r"^add_request of 500 ids, 200 times: \d+\.\dus", out, re.M)
