"""The pages for users and contributors: their links, the code that they name, and their example."""

import ast
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from nanovllm import LLM
from nanovllm.models import MODELS
from tests.helpers import ROOT
from tests.helpers.checkpoints import CONFIGS, make_checkpoint
from tests.helpers.reference import HuggingFace, greedy_ids

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "demo" / "README.md"]
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_files(page: Path) -> None:
    targets = LINK.findall(page.read_text())
    for target in targets:
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("page", "at_least"),
    [("adding_a_model.md", 6), ("adding_a_sampling_parameter.md", 8)],
)
def test_files_that_the_pages_name_exist(page: str, at_least: int) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"`((?:nanovllm|tests)/[\w/]+\.py)`", text))
    named -= {"nanovllm/models/FAMILY.py", "nanovllm/models/llama.py"}  # what the reader adds
    assert len(named) >= at_least
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_functions_that_the_pages_name_exist() -> None:
    methods = set()
    for module in (ROOT / "nanovllm").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {
                    f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)
                }
                methods |= names
    pages = (ROOT / "docs" / "how_a_step_works.md", ROOT / "README.md")
    named = {name for page in pages for name in re.findall(r"`([A-Z]\w+\.\w+)`", page.read_text())}
    named.discard("CONTRIBUTING.md")
    assert len(named) >= 8
    assert sorted(named - methods) == []


def test_the_example_of_adding_a_model_equals_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ragged_prompts: list[list[int]]
) -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    namespace: dict[str, type] = {}
    exec(compile(code, "adding_a_model.md", "exec"), namespace)
    monkeypatch.setitem(MODELS, "LlamaForCausalLM", namespace["LlamaForCausalLM"])
    monkeypatch.setitem(CONFIGS, "LlamaForCausalLM", LlamaConfig)
    # The page says how to do without this field.
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", use_sliding_window=False)
    prompts = ragged_prompts[:6]
    reference = HuggingFace(path)
    with LLM(str(path), max_model_len=256) as llm:
        ids = greedy_ids(llm, prompts, max_tokens=24)
    assert ids == [reference.greedy(prompt, 24, stop=frozenset()) for prompt in prompts]
