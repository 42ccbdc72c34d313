"""Runs each example as its page says, on the demo model."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batch.jobs import read_rows
from tests.helpers import ROOT
from tests.helpers.faults import STARTING

EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
COMMANDS = re.findall(r"^\| `(python [^`]+)`", PAGE, re.MULTILINE)
NEEDS = {"ray_data.py": "ray", "nanovllm.lm_eval": "lm_eval"}


def run(command: str, output: Path) -> str:
    """Runs a command of the page from the root of the project, on one thread of the CPU."""
    python, *arguments = shlex.split(command.replace("out.jsonl", str(output)))
    assert python == "python"
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=STARTING,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_the_page_names_all_examples() -> None:
    named = {Path(word).name for command in COMMANDS for word in command.split() if ".py" in word}
    assert named == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("command", [c for c in COMMANDS if "rl_loop" not in c])
def test_example(command: str, tmp_path: Path) -> None:
    for word, package in NEEDS.items():
        if word in command and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    output = tmp_path / "out.jsonl"
    text = run(command, output)
    assert len(text.split()) > 10
    if "nanovllm.batch" in command:
        assert all(row["text"] for row in read_rows(output))


def test_the_reward_rises() -> None:
    text = run("python examples/rl_loop.py --rounds 4", Path())
    rewards = [float(value) for value in re.findall(r"mean reward ([\d.]+)", text)]
    assert len(rewards) == 4
    assert rewards[-1] > rewards[0] + 0.3
