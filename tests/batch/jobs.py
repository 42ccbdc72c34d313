"""Runs small jobs on the CPU, in this process or another one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nanovllm.batch.__main__ import main
from tests.helpers import ROOT

SMALL = ("--device=cpu", "--max-model-len=128", "--max-num-seqs=8", "--num-kvcache-blocks=16")


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Writes rows as JSON Lines; a str is a line as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_job(rows: Path, output: Path, model: Path, *options: str) -> int:
    """Runs a job in this process and returns its exit code."""
    return main([str(rows), str(output), f"--model={model}", "--no-progress", *SMALL, *options])


def start_job(
    rows: Path, output: Path, model: Path, *options: str, under: Sequence[str] = (), **keywords: Any
) -> "subprocess.Popen[str]":
    """Starts a job in a process of its own; `under` is a command that takes one to run."""
    command = [sys.executable, "-m", "nanovllm.batch", str(rows), str(output), f"--model={model}"]
    return subprocess.Popen(
        [*under, *command, "--no-progress", *SMALL, *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **keywords,
    )
