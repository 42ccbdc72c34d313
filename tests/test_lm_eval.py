"""Tests that evaluations by lm-evaluation-harness score as its own Hugging Face model does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from nanovllm.lm_eval import NanoVLLM  # noqa: E402
from tests.helpers.checkpoints import CORPUS  # noqa: E402

ENGINE = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 512, "num_kvcache_blocks": 16}
DOCS = [
    {"text": "introduce", "choices": [" yourself", " a man", " primes"], "answer": 0},
    {"text": "It is a truth", "choices": [" universally", " within"], "answer": 0},
    {"text": CORPUS[2][:70], "choices": [" good fortune", " list", " 100"], "answer": 0},
    {"text": "list all prime ", "choices": ["numbers", "wife"], "answer": 0},
]
TASKS = {
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "perplexity": """
task: perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}} {{choices[0]}} {{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "completion": """
task: completion
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["e", "\\n\\n"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    (path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    files = json.dumps({"test": str(path / "docs.jsonl")})
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {files}}}\ntest_split: test\n"
        (path / f"{name}.yaml").write_text(text.lstrip() + source)
    return path


@pytest.fixture(scope="module")
def ours(tiny_qwen3: Path) -> Iterator[NanoVLLM]:
    model = NanoVLLM(str(tiny_qwen3), **ENGINE)
    yield model
    model._llm.exit()


def evaluated(model: Any, tasks: Path, name: str) -> dict[str, Any]:
    return lm_eval.simple_evaluate(
        model,
        tasks=[name],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
    )


@pytest.mark.parametrize("name", list(TASKS))
def test_scores_are_those_of_hugging_face(
    name: str, ours: NanoVLLM, tasks: Path, tiny_qwen3: Path
) -> None:
    expected = evaluated(HFLM(str(tiny_qwen3), device="cpu", dtype="float32"), tasks, name)
    found = evaluated(ours, tasks, name)
    scores, expected_scores = (
        {key: value for key, value in result["results"][name].items() if key[0] not in " n"}
        for result in (found, expected)
    )
    assert scores.keys() == expected_scores.keys()
    for key, value in expected_scores.items():
        assert scores[key] == (pytest.approx(value, rel=1e-4) if type(value) is float else value)
    pairs = zip(found["samples"][name], expected["samples"][name], strict=True)
    for sample, expected_sample in pairs:
        if name == "completion":
            assert sample["resps"] == expected_sample["resps"]
            continue
        for (response,), (reference,) in zip(
            sample["resps"], expected_sample["resps"], strict=True
        ):
            value, expected_value = (
                r if isinstance(r, float) else r[0] for r in (response, reference)
            )
            assert value == pytest.approx(expected_value, rel=1e-4)
            if not isinstance(reference, float):
                assert response[1] == reference[1]  # whether greedy decoding says it


def test_contexts_are_computed_once(ours: NanoVLLM) -> None:
    """A long context with several continuations of one token takes its blocks from the cache."""
    context = [7] * 300
    pairs = [(context, [token]) for token in (5, 6, 7)]
    ours._llm.reset_prefix_cache()
    computed = 0
    step = ours._llm._step

    def counting() -> Any:
        nonlocal computed
        batch = step()
        computed += batch.num_prefilled if batch else 0
        return batch

    ours._llm._step = counting  # type: ignore[method-assign]
    try:
        scores = ours._scores(pairs, disable_tqdm=True)
    finally:
        del ours._llm._step
    assert computed == 300 + 2 * (300 - 256)
    alone = [ours._scores([pair], disable_tqdm=True)[0] for pair in pairs]
    assert [logprob for logprob, _ in scores] == pytest.approx([p for p, _ in alone], rel=1e-5)
    assert sum(is_greedy for _, is_greedy in scores) <= 1
