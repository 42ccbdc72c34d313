"""Tests demo/train.py from end to end, and the checkpoint in demo/austen that it made."""

import importlib
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from tests.helpers import ROOT
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.faults import STARTING
from tests.helpers.reference import HuggingFace, next_token_logits

DEMO = ROOT / "demo"
SHIPPED = DEMO / "austen"
needs_shipped = pytest.mark.skipif(
    not SHIPPED.exists(), reason="demo/austen is not there; demo/train.py makes it"
)

TINY_RUN = (
    "--held-out second --device cpu --vocab-size 320 --hidden-size 64 --intermediate-size 96 "
    "--layers 2 --heads 2 --kv-heads 1 --context 32 --batch-size 8 --steps 20 --warmup 2 "
    "--eval-every 10 --sample-tokens 8"
)
NOVEL = """A TITLE

by its Author

CHAPTER I

It was _so_ very
fine  a day.

[A note of the editor.]

   * * * * *

"Indeed!"

VOLUME II

Chapter 2.

They married.

FINIS

A printer's address.
"""
# From the fourth chapter of Persuasion, which the shipped model has not seen.
PASSAGE = (
    "She had only navy lists and newspapers for her authority, but she could not doubt his being "
    "rich; and, in favour of his constancy, she had no reason to believe him married.\nHow "
    "eloquent could Anne Elliot have been! how eloquent, at least, were her wishes on the side of "
    "early warm attachment, and a cheerful confidence in futurity, against that over-anxious "
    "caution which seems to insult exertion and distrust Providence! She had been forced into "
    "prudence in her youth, she learned romance as she grew older: the natural sequel of an "
    "unnatural beginning."
)
PROMPTS = [
    "The carriage stopped before the door, and",
    "She had never been so happy as",
    "Mr. Knightley was not",
    '"You are very kind," said Elizabeth,',
]
COMMON_WORDS = (
    "the to and of a her i in was it she that not be he his had as you for with but is have at mr "
    "him on my by all so they were which could been from no very what would this me or their them "
    "will there an if when do more any"
)


def run_train(*args: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, DEMO / "train.py", *args],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=STARTING,
    )


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes two novels of three chapters in which each word helps to predict the next."""
    path, rng = tmp_path_factory.mktemp("novels"), random.Random(0)
    subjects, verbs = ["Emma", "my dear aunt", "the colonel"], ["admired", "forgot", "married"]
    for name in ("first", "second"):
        text = name.upper()
        for chapter in range(1, 4):
            text += f"\n\nChapter {chapter}\n"
            for _ in range(30):
                text += f"\n{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(subjects)}.\n"
        (path / f"{name}.txt").write_text(text)
    return path


@pytest.fixture(scope="module")
def trained(novels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    result = run_train("--text", novels, "--out", path, *TINY_RUN.split())
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^step \d+/20  train ", result.stdout, re.M)) == 2
    figures = json.loads(result.stdout.splitlines()[-1])
    assert json.loads((path / "training.json").read_text()).items() >= figures.items()
    return path


@pytest.fixture
def demo_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module


def test_training_learns_and_reports_what_it_measured(trained: Path) -> None:
    report = json.loads((trained / "training.json").read_text())
    assert report["options"].items() >= {"held_out": "second", "steps": 20, "seed": 0}.items()
    assert [entry["step"] for entry in report["log"]] == [10, 20]
    assert len(report["samples"]) == 3
    part = report["held_out"]
    assert part["loss"] < 0.9 * math.log(report["vocab_size"]), "nothing was learnt"
    assert part["perplexity"] == pytest.approx(math.exp(part["loss"]))
    bits = part["loss"] * part["tokens"] / math.log(2)
    assert part["bits_per_byte"] == pytest.approx(bits / part["bytes"])
    assert [report[name]["chapters"] for name in ("train", "validation", "held_out")] == [3, 2, 1]


def test_trained_checkpoint_is_bfloat16_and_generates(trained: Path) -> None:
    weights = load_file(trained / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights, "tied"
    with make_llm(trained, max_model_len=32) as llm:
        assert llm.config.torch_dtype == torch.bfloat16
        assert llm.scheduler.stop_token_ids == {0}
        (output,) = llm.generate("Emma admired", SamplingParams(max_tokens=8), use_tqdm=False)
    assert output["text"]
    assert output["finish_reason"] in ("stop", "length")


def test_training_is_repeatable(trained: Path, novels: Path, tmp_path: Path) -> None:
    assert run_train("--text", novels, "--out", tmp_path, *TINY_RUN.split()).returncode == 0
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_missing_novel_ends_with_advice(novels: Path, tmp_path: Path) -> None:
    result = run_train("--text", novels, "--out", tmp_path, "--held-out", "third")
    assert result.returncode == 1
    assert re.fullmatch(r"error: .* must hold third\.txt and .*\n", result.stderr)


def test_chapters_hold_the_novels_own_words_only(demo_module: Any, tmp_path: Path) -> None:
    corpus = demo_module("corpus")
    path = tmp_path / "novel.txt"
    path.write_text(NOVEL)
    assert corpus.read_chapters(path) == ['It was so very fine a day.\n"Indeed!"', "They married."]
    path.write_text("No chapters\nat all.")
    assert corpus.read_chapters(path) == ["No chapters at all."]


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 13, 14, 31])
def test_mean_loss_scores_every_token_once(
    num_tokens: int, demo_module: Any, tiny_qwen3: Path
) -> None:
    context, stride = 9, 4
    reference = HuggingFace(tiny_qwen3)
    ids = torch.randint(512, (num_tokens,), generator=torch.Generator().manual_seed(0))
    losses = []
    for target in range(1, num_tokens):
        start = stride * math.ceil(max(0, target - context) / stride)
        logits = reference.last_logits(ids[start:target].tolist())
        losses.append(-logits.log_softmax(-1)[ids[target]].item())
    loss = demo_module("loop").mean_loss(reference.model, ids, context)
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.fixture(scope="module")
def shipped() -> Iterator[LLM]:
    # All prefixes of the passage fit one step.
    sizes = {"max_model_len": 512, "num_kvcache_blocks": 1024, "max_num_seqs": 512}
    with make_llm(SHIPPED, dtype="float32", **sizes) as llm:
        yield llm


@needs_shipped
def test_shipped_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 16_000_000


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())


@needs_shipped
def test_shipped_samples_are_seeded_and_readable(shipped: LLM) -> None:
    assert shipped.tokenizer is not None

    def sample(seed: int) -> list[str]:
        params = SamplingParams(temperature=0.8, max_tokens=80, seed=seed, ignore_eos=True)
        return [out["text"] for out in shipped.generate(PROMPTS, params, use_tqdm=False)]

    texts = sample(1)
    assert sample(1) == texts
    others = sample(2)
    assert all(text != other for text, other in zip(texts, others, strict=True))

    # Austen's own chapters have about 0.9, 0.48 and 0.5, random tokens 0.73, 0.03 and 0.95.
    whole = {token[1:].lower() for token in shipped.tokenizer.get_vocab() if token[0] == "Ġ"}
    said = words(" ".join(texts + others))
    assert len(said) > 300
    assert sum(word in whole for word in said) > 0.85 * len(said)
    assert 0.35 < sum(word in COMMON_WORDS.split() for word in said) / len(said) < 0.65
    assert 0.25 < len(set(said)) / len(said) < 0.75


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    """Returns the perplexity of ids[1:], given the logits after each id but the last."""
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item())


@needs_shipped
def test_shipped_perplexity_equals_hugging_face(shipped: LLM) -> None:
    """Both are teacher-forced: the engine gets every prefix of the passage, Hugging Face the whole
    passage."""
    assert shipped.tokenizer is not None
    reference = HuggingFace(SHIPPED)
    ids = shipped.tokenizer.encode(PASSAGE)
    assert shipped.tokenizer.decode(ids) == PASSAGE
    ours = perplexity(next_token_logits(shipped, [ids[:n] for n in range(1, len(ids))]), ids)
    with torch.inference_mode():
        theirs = perplexity(reference.model(torch.tensor([ids[:-1]])).logits[0], ids)
        random.Random(0).shuffle(ids)
        shuffled = perplexity(reference.model(torch.tensor([ids[:-1]])).logits[0], ids)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours < shuffled / 4, "word order should tell"


@needs_shipped
def test_shipped_greedy_ids_equal_hugging_face(shipped: LLM) -> None:
    assert shipped.tokenizer is not None
    reference = HuggingFace(SHIPPED)
    prompts = [shipped.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [reference.greedy(prompt, 200, stop=frozenset()) for prompt in prompts]
    assert greedy_ids(shipped, prompts, max_tokens=200) == expected
