"""Runs each example as its page says, on the demo model. That of Ray runs in tests/test_ray.py."""

import importlib
import re
import runpy
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.batch.jobs import read_rows
from tests.helpers import ROOT

EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
COMMANDS = re.findall(r"^\| `(python [^`]+)`", PAGE, re.MULTILINE)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command of the page in this process, from the root of the project, on the CPU."""
    python, *arguments = shlex.split(command)
    assert python == "python"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    is_module = arguments[0] == "-m"
    monkeypatch.setattr(sys, "argv", arguments[is_module:])
    if not is_module:
        runpy.run_path(arguments[0], run_name="__main__")
        return
    with suppress(ModuleNotFoundError):  # a package has its entry point in a module of its own
        arguments[1] = importlib.import_module(arguments[1] + ".__main__").__name__
    assert not importlib.import_module(arguments[1]).main(arguments[2:])


def test_the_page_names_all_examples() -> None:
    named = {Path(word).name for command in COMMANDS for word in command.split() if ".py" in word}
    assert named == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", ["chat", "streaming", "self_consistency", "constrained_choice"])
def test_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"python examples/{name}.py", monkeypatch)
    assert len(capsys.readouterr().out.split()) > 10


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = [c for c in COMMANDS if "nanovllm.batch" in c]
    output = tmp_path / "out.jsonl"
    run(command.replace("out.jsonl", str(output)), monkeypatch)
    assert all(row["text"] for row in read_rows(output))


def test_an_evaluation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    (command,) = [c for c in COMMANDS if "nanovllm.lm_eval" in c]
    run(command, monkeypatch)
    assert re.search(r"next_word\b.*\bacc\b", capsys.readouterr().out)


def test_the_reward_rises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("python examples/rl_loop.py --rounds 3", monkeypatch)
    rewards = re.findall(r"mean reward ([\d.]+)", capsys.readouterr().out)
    assert len(rewards) == 3
    assert float(rewards[-1]) > float(rewards[0]) + 0.1
