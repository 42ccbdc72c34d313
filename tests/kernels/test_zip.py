"""Tests that the CPU kernels work in a package that is imported from a zip file, as zipapps and
cluster schedulers do."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.faults import STARTING

pytest.importorskip("numba")

SCRIPT = """
import torch
import nanovllm
assert ".zip" in nanovllm.__file__, nanovllm.__file__
from nanovllm.kernels import cpu_kernels
x, residual = torch.tensor([[[3.0, 3.0]], [[1.0, 1.0]]])
cpu = cpu_kernels(x)
assert cpu is not None, "torch would do the work"
cpu.add_rms_norm(x, residual, torch.full((2,), 2.0), 0.0)
assert (x.tolist(), residual.tolist()) == ([[2.0, 2.0]], [[4.0, 4.0]])
"""


def test_kernels_of_a_zip_compile_without_a_word(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as package:
        package.writestr("nanovllm/__init__.py", "")  # the real one imports transformers
        for part in ("kernels", "utils"):
            for path in (ROOT / "nanovllm" / part).rglob("*.py"):
                package.write(path, path.relative_to(ROOT))
    env = os.environ | {
        "PYTHONPATH": str(tmp_path / "package.zip"),
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True, text=True, env=env, cwd=tmp_path, timeout=STARTING,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
