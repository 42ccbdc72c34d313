"""Tests example.py and bench.py as a user runs them, and what README.md promises."""

import json
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bench
import example
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from tests.helpers import ROOT
from tests.helpers.checkpoints import VOCAB_SIZE, edit_json, make_checkpoint
from tests.helpers.engines import make_llm
from tests.helpers.faults import STARTING

README = (ROOT / "README.md").read_text()
RUN_LINE = re.compile(r"^Total: (\d+)tok, Time: \d+\.\d\ds, Throughput: \d+\.\d\dtok/s$", re.M)
QWEN3_VOCAB_SIZE = 151936


def run_script(name: str, *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, ROOT / name, *args],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=STARTING,
    )


def default_workload(**changes: Any) -> list[tuple[list[int], int]]:
    args = {"vocab_size": QWEN3_VOCAB_SIZE, "seed": 0} | changes
    return bench.make_workload(256, (100, 1024), (100, 1024), **args)


def lengths(workload: list[tuple[list[int], int]]) -> list[tuple[int, int]]:
    return [(len(prompt), max_tokens) for prompt, max_tokens in workload]


def section(title: str) -> str:
    """Returns the README's text from the heading that starts with `title` to the next heading."""
    match = re.search(rf"^##+ {re.escape(title)}[^\n]*\n(.*?)(?=^#|\Z)", README, re.M | re.S)
    assert match, f"README.md has no section {title!r}"
    return match[1]


def code_block(text: str, language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", text, re.S)
    assert match, f"no {language} block"
    return match[1]


def test_workload_totals() -> None:
    workload = default_workload()
    assert len(workload) == 256
    assert sum(len(prompt) for prompt, _ in workload) == 142_827
    assert sum(max_tokens for _, max_tokens in workload) == 133_966
    ids = [token_id for prompt, _ in workload for token_id in prompt]
    assert (min(ids), max(ids)) == (0, 10000)
    args = vars(bench.parse_args(["--model", "somewhere"]))
    assert [args[name] for name in ("num_seqs", "seed", "temperature", "max_model_len")] == [
        256,
        0,
        0.6,
        4096,
    ]
    for what in ("input", "output"):
        assert (args[f"min_{what}_len"], args[f"max_{what}_len"]) == (100, 1024)


def test_workload_is_repeatable_and_later_runs_have_other_ids() -> None:
    first = default_workload()
    assert default_workload() == first
    assert lengths(default_workload(seed=1)) != lengths(first)
    later = [default_workload(run=run) for run in (1, 2)]
    for workload in later:
        assert lengths(workload) == lengths(first)
    for prompts in zip(first, *later, strict=True):
        assert len({tuple(prompt[:50]) for prompt, _ in prompts}) == 3


def test_workload_fits_a_small_vocabulary_without_changing_the_lengths() -> None:
    small = default_workload(vocab_size=VOCAB_SIZE)
    assert lengths(small) == lengths(default_workload())
    assert max(max(prompt) for prompt, _ in small) < VOCAB_SIZE


@pytest.mark.parametrize(
    "args",
    [
        ["--runs", "0"],
        ["--num-seqs", "0"],
        ["--min-input-len", "2000"],
        ["--min-output-len", "9", "--max-output-len", "8"],
        ["--top-p", "1.5"],
        ["--logprobs", "21"],
    ],
)
def test_bench_rejects_impossible_sizes(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        bench.parse_args(args)
    assert error.value.code == 2
    assert args[0] in capsys.readouterr().err


def test_bench_options_reach_the_requests() -> None:
    args = bench.parse_args(["--model", "m", "--top-k", "20", "--top-p", "0.95", "--logprobs", "1"])
    _, params = bench.make_requests(VOCAB_SIZE, args, run=0)
    assert {(p.temperature, p.top_k, p.top_p, p.logprobs) for p in params} == {(0.6, 20, 0.95, 1)}
    _, params = bench.make_requests(VOCAB_SIZE, bench.parse_args(["--model", "m"]), run=0)
    assert all(p.is_plain for p in params)


def test_bench_end_to_end(tiny_qwen3: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = "--num-seqs 5 --min-input-len 3 --max-input-len 40 --min-output-len 2"
    options += " --max-output-len 9 --runs 2 --seed 7 --max-model-len 256 --max-num-seqs 4"
    options += " --kvcache-block-size 16 --num-kvcache-blocks 64 --enforce-eager"
    result = run_script(
        "bench.py", "--model", str(tiny_qwen3), "--json", str(path), *options.split()
    )
    assert result.returncode == 0, result.stderr
    assert "Generating" not in result.stderr, "the progress bar must not run in a timed region"
    report = json.loads(path.read_text())

    workload = bench.make_workload(5, (3, 40), (2, 9), vocab_size=VOCAB_SIZE, seed=7)
    total = sum(max_tokens for _, max_tokens in workload)
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"Construction: \d+\.\d\ds", lines[0])
    assert RUN_LINE.findall(result.stdout) == [str(total)] * 2
    assert len(lines) == 3

    assert report["construction_seconds"] > 0
    assert len(report["runs"]) == 2
    for run in report["runs"]:
        assert list(zip(run["input_lens"], run["output_lens"], strict=True)) == lengths(workload)
        assert run["input_tokens"] == sum(run["input_lens"])
        assert run["output_tokens"] == total
        assert run["output_tokens_per_second"] == pytest.approx(total / run["seconds"])
    expected: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kvcache_block_size": 16,
        "seed": 7,
    }
    expected |= {"num_kvcache_blocks": 64, "enforce_eager": True, "torch_dtype": "torch.float32"}
    assert report["config"].items() >= expected.items()
    assert report["options"].items() >= {"num_seqs": 5, "runs": 2, "temperature": 0.6}.items()
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["transformers"] == transformers.__version__
    assert report["device_name"]


@pytest.mark.alone
def test_example_end_to_end(tiny_qwen3: Path) -> None:
    result = run_script("example.py", "--model", str(tiny_qwen3))
    assert result.returncode == 0, result.stderr
    for question in ("introduce yourself", "list all prime numbers within 100"):
        assert re.search(rf"^Prompt: '{question}'\nCompletion: .+$", result.stdout, re.M)


def test_example_asks_through_the_chat_template_if_there_is_one(
    tiny_qwen3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[list[str], SamplingParams]] = []
    generate = LLM.generate

    def spy(self: LLM, prompts: list[str], sampling_params: SamplingParams) -> Any:
        asked.append((prompts, sampling_params))
        return generate(self, prompts, SamplingParams(max_tokens=2), use_tqdm=False)

    monkeypatch.setattr(LLM, "generate", spy)
    plain = make_checkpoint(tmp_path)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(plain / "tokenizer_config.json", chat_template=None)
    for model in (tiny_qwen3, plain):
        example.main(["--model", str(model)])
        assert capsys.readouterr().out.count("Completion: ") == 2
    assert [params for _, params in asked] == [SamplingParams(temperature=0.6, max_tokens=256)] * 2
    chat = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in example.QUESTIONS]
    assert [prompts for prompts, _ in asked] == [chat, example.QUESTIONS]


def test_missing_directory_ends_with_advice(tmp_path: Path) -> None:
    result = run_script("example.py", "--model", str(tmp_path / "nowhere"))
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, "one paragraph, no traceback"
    for words in (str(tmp_path / "nowhere"), "does not exist", "download"):
        assert words in result.stderr


@pytest.mark.parametrize("main", [example.main, bench.main])
def test_a_model_that_cannot_be_served_ends_without_traceback(main: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .* has no config\.json"):
        main(["--model", str(tmp_path)])


def test_example_without_tokenizer_says_so(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, with_tokenizer=False)
    with pytest.raises(SystemExit, match="has no tokenizer"):
        example.main(["--model", str(model)])


def test_readme_quick_start_runs(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = code_block(section("Quick start"), "python")
    model = "~/huggingface/Qwen3-0.6B"
    assert code.count(model) == 1
    exec(compile(code.replace(model, str(tiny_qwen3)), "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_readme_chat_and_stream_run(tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = code_block(section("Methods of `LLM`"), "python")
    with make_llm(tiny_qwen3) as llm:
        exec(compile(code, "README.md", "exec"), {"llm": llm, "SamplingParams": SamplingParams})
        assert llm.is_finished()
    assert capsys.readouterr().out


def test_readme_reading_path_names_files_of_the_package() -> None:
    named = re.findall(r"\(nanovllm/[^)]+\.py\)", section("Reading path"))
    assert len(set(named)) == len(named) >= 15
    for link in named:
        assert (ROOT / link.strip("()")).is_file(), f"{link} is gone"


def test_readme_takes_five_minutes() -> None:
    words = [word for word in README.split() if any(map(str.isalnum, word))]  # no table's bars
    assert len(words) < 1600


@pytest.mark.parametrize(
    ("title", "cls"), [("`LLM(", Config), ("`SamplingParams(", SamplingParams)]
)
def test_readme_lists_every_option_with_its_default(title: str, cls: Any) -> None:
    listed = re.findall(r"^\| `(\w+)` \| `?(.+?)`? \|", section(title), re.M)
    expected = [
        (field.name, "required" if field.default is MISSING else repr(field.default))
        for field in fields(cls)
        if field.init
    ]
    assert sorted((name, default.replace('"', "'")) for name, default in listed) == sorted(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default on a GPU is the full workload")
def test_benchmark_without_arguments_runs_the_demo_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench.main(["--json", str(tmp_path / "result.json"), "--num-seqs", "2"])
    assert "Throughput: " in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert Path(result["options"]["model"]).parts[-2:] == ("demo", "austen")
