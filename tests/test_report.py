"""Tests `python -m nanovllm.report`, and the package's metadata."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import nanovllm
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.report import engine_choices, machine, main, report, version
from tests.helpers import ROOT
from tests.helpers.checkpoints import edit_json, make_checkpoint
from tests.helpers.engines import make_llm
from tests.helpers.faults import STARTING


def run_python(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=STARTING,
        check=True,
    )


def test_report_as_json(tiny_qwen3: Path) -> None:
    result = run_python("-m", "nanovllm.report", "--json", "--model", str(tiny_qwen3))
    assert "RuntimeWarning" not in result.stderr
    found = json.loads(result.stdout)
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert found["numpy"] == np.__version__
    assert found["CUDA"].startswith(torch.version.cuda or "none")
    assert ("GPU" in found) == (torch.cuda.device_count() == 0)
    assert torch.backends.cpu.get_cpu_capability() in found["CPU"]
    available, total = map(float, re.findall(r"\d+\.\d", found["memory"]))
    assert 0 < available <= total
    assert found["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]
    assert found["model"] == "Qwen3ForCausalLM, 2 layers, hidden size 64"


def test_report_as_text(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", str(tiny_qwen3)])
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"] == torch.__version__
    assert {"nanovllm", "python", "triton", "flash-attn", "numba", "CPU", "threads"} <= set(rows)
    assert rows["model"] == "Qwen3ForCausalLM, 2 layers, hidden size 64"
    assert rows["computes"].startswith("in float32 on ")
    assert {"attention", "kernels", "matmul"} <= set(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_report_says_what_an_engine_chooses(tiny_qwen3: Path, dtype: str) -> None:
    with make_llm(tiny_qwen3, dtype=dtype) as llm:
        choices = engine_choices(llm.config)
        runner = llm._runner
        assert isinstance(runner, ModelRunner)
        layer = next(m for m in runner.model.modules() if isinstance(m, RowParallelLinear))
        assert choices["attention"] == runner.backend.name
        assert ("not numba" in choices) == (runner.backend.name == "torch")
        assert choices["computes"] == f"in {dtype} on cpu"
        assert ("oneDNN" in choices["matmul"]) == layer.weight.is_mkldnn
        assert choices["matmul"].endswith(str(layer.weight.dtype).removeprefix("torch."))
    assert "not torch" not in choices
    assert "needs a CUDA GPU" in choices["not triton"]
    assert "needs a CUDA GPU" in choices["not flash_attn"]


@pytest.mark.gpu
def test_the_report_says_what_an_engine_chooses_on_a_gpu(tiny_qwen3: Path) -> None:
    with make_llm(tiny_qwen3, device="cuda", max_num_seqs=4) as llm:
        choices = engine_choices(llm.config)
        assert choices["attention"] == "triton"
        assert "not triton" not in choices
        assert choices["kernels"] == "triton"
    assert machine()["GPU 0"].startswith(torch.cuda.get_device_name(0))


def test_gpus_are_listed_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"GPU of {index}", major=9, minor=0, total_memory=3 << 29)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found = machine()
    assert found["GPU 0"].startswith("GPU of 0")
    assert found["GPU 1"] == "GPU of 1, capability 9.0, 1.5 GiB"
    assert "GPU" not in found


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"architectures": ["NoSuchModel"]}, "ValueError: architectures ['NoSuchModel']"),
        ({"torch_dtype": "float64", "dtype": "float64"}, "ValueError: dtype must be"),
        ({"hidden_act": "gelu"}, "ValueError: hidden_act='gelu'"),
    ],
)
def test_a_checkpoint_that_is_refused_is_part_of_the_report(
    changes: dict[str, Any], error: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", **changes)
    found = report(str(path))
    assert str(found["model"]).startswith(error)
    assert found["torch"] == torch.__version__


def test_a_missing_checkpoint_is_part_of_the_report(tmp_path: Path) -> None:
    assert "does not exist" in str(report(str(tmp_path / "nowhere"))["model"])


WITHOUT_GPU_PACKAGES = """
import runpy, sys
from importlib import metadata
installed = metadata.version

def version(name):
    if name in ("nanovllm", "triton", "flash-attn"):
        raise metadata.PackageNotFoundError(name)
    return installed(name)

metadata.version = version
sys.modules["triton"] = sys.modules["flash_attn"] = None  # importing them raises ImportError
sys.argv = ["report", "--model", sys.argv[1]]
runpy.run_module("nanovllm.report", run_name="__main__")
print(sys.modules["nanovllm"].__version__)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs triton")
def test_the_report_needs_no_triton_and_no_flash_attn(tiny_qwen3: Path) -> None:
    result = run_python("-c", WITHOUT_GPU_PACKAGES, str(tiny_qwen3))
    *lines, own_version = result.stdout.splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines)
    assert rows["triton"] == rows["flash-attn"] == "not installed"
    assert rows["nanovllm"] == "unknown"
    assert rows["attention"] in ("numba", "torch")
    assert own_version == "0+unknown"


def test_versions_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lies_on_the_path.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert version("numpy") == np.__version__
    assert version("lies-on-the-path") == "unknown"
    assert version("is-nowhere") is None


def test_the_package_is_typed_and_has_a_version() -> None:
    assert (ROOT / "nanovllm" / "py.typed").is_file()
    try:
        expected = metadata.version("nanovllm")
    except metadata.PackageNotFoundError:
        expected = "0+unknown"
    assert nanovllm.__version__ == expected


def test_nothing_that_must_be_compiled_is_required() -> None:
    """flash-attn takes hours to build where there is no wheel, so it is an extra."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[^\w-]", name, maxsplit=1)[0] for name in project["dependencies"]}
    assert {"torch", "transformers", "safetensors"} <= required
    assert required.isdisjoint({"flash-attn", "ray", "lm-eval", "pyarrow"})
    assert set(project["optional-dependencies"]) >= {"flash-attn", "ray", "eval", "batch"}
