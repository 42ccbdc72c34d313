"""Runs the benchmark that compares the engine with Hugging Face on the CPU from end to end."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import cpu


def test_benchmark_prints_both_rates_and_their_ratio(
    tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    options = "--batch 3 --tokens 4 --prefill 20 --repeats 1 --threads 1"
    try:
        cpu.main(["--model", str(tiny_qwen3), *options.split()])
    finally:
        torch.set_num_threads(threads)
    about, *results = capsys.readouterr().out.splitlines()
    assert "threads 1," in about
    assert torch.__version__ in about
    assert [result.partition(":")[0] for result in results] == ["decode 3 x 4", "prefill 20"]
    for result in results:
        found = re.search(r"transformers ([\d.]+) tok/s, nanovllm ([\d.]+) tok/s, ratio", result)
        assert found, result
        assert min(float(rate) for rate in found.groups()) > 0


def test_ours_is_compared_with_each_peer(capsys: pytest.CaptureFixture[str]) -> None:
    cpu.report("decode", 10, {"one": [1.0, 2.0], "another": [4.0, 3.0], "nanovllm": [0.5]})
    assert capsys.readouterr().out.endswith("nanovllm 20.0 tok/s, ratio 2.00 and 6.00\n")
