"""Tests the threads of the CPU kernels: several callers, a fork, their end, and a short life."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from tests.helpers.faults import STARTING

SETUP = """
import os, torch
from concurrent.futures import ThreadPoolExecutor
from nanovllm.kernels import cpu
torch.set_num_threads(3)
generator = torch.Generator().manual_seed(0)
x, weight = torch.randn(40, 300, generator=generator), torch.randn(500, 300, generator=generator)
packed = cpu.pack(weight)
expected = x @ weight.T
def check(repeats=20):
    for _ in range(repeats):
        out = cpu.linear(x, packed, 500, None)
        assert torch.allclose(out, expected, rtol=1e-4, atol=1e-4)
check()
"""
CASES = {
    "several callers": """
with ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(check, 200) for _ in range(4)]:
        future.result()
""",
    "another number of threads": """
for n in (1, 2, 4, 3):
    torch.set_num_threads(n)
    check()
""",
    "after a pause": """
import time
for _ in range(20):
    time.sleep(0.01)
    check(2)
""",
    "fork": """
child = os.fork()
check()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "fork that exits": """
import atexit
child = os.fork()
if child == 0:
    atexit._run_exitfuncs()
    os._exit(0)  # torch itself crashes later on
assert os.waitpid(child, 0)[1] == 0
check()
""",
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_end(case: str) -> None:
    """Each script runs in a process of its own, whose end must not hang or crash either."""
    script = SETUP + CASES[case]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, env=env, timeout=STARTING,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
