"""Tests the pages for users and contributors: their links, the code they name, and their
example."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from nanovllm.models import MODELS
from tests.helpers import ROOT
from tests.helpers.checkpoints import CONFIGS, edit_json, make_checkpoint
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.faults import STARTING
from tests.helpers.reference import HuggingFace

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
    named -= {"nanovllm/models/FAMILY.py", "nanovllm/models/arcee.py"}  # the reader adds these
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


@pytest.mark.skipif(
    not hasattr(transformers, "ArceeConfig"), reason="transformers is older than Arcee"
)
@pytest.mark.parametrize("has_biases", [False, True])
def test_the_example_of_adding_a_model_equals_hugging_face(
    has_biases: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ragged_prompts: list[list[int]],
) -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    namespace: dict[str, type] = {}
    exec(compile(code, "adding_a_model.md", "exec"), namespace)
    monkeypatch.setitem(MODELS, "ArceeForCausalLM", namespace["ArceeForCausalLM"])
    monkeypatch.setitem(CONFIGS, "ArceeForCausalLM", transformers.ArceeConfig)
    path = make_checkpoint(tmp_path, "ArceeForCausalLM", mlp_bias=has_biases)
    prompts = ragged_prompts[:6]
    reference = HuggingFace(path)
    with make_llm(path, device="auto") as llm:
        ids = greedy_ids(llm, prompts, max_tokens=24)
    assert ids == [reference.greedy(prompt, 24, stop=frozenset()) for prompt in prompts]
    edit_json(path / "config.json", hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act='gelu' is not supported; only 'relu2' is"):
        make_llm(path)


LIMITED_SAMPLING = """
import torch
from nanovllm import LLM, SamplingParams
from nanovllm.kernels import filters as kernels
from nanovllm.layers import filters as layers
from nanovllm.utils.sampling_state import SamplingState
from nanovllm.utils.special_rows import FilterRows

wants = [{"vocab_limit": (None, 5, 900)[i % 3], "temperature": i % 2} for i in range(12)]
params = [SamplingParams(**want, top_k=i % 4) for i, want in enumerate(wants)]
assert [p.is_plain for p in params[:3]] == [True, False, False]
logits = torch.randn(12, 2048, generator=torch.Generator().manual_seed(0))
columns = FilterRows.columns(range(12), range(12), params)


def draw(implementation, device):
    state = SamplingState.zeros(12, torch.device(device))
    state.temperatures.copy_(torch.tensor([p.temperature for p in params]))
    rows = FilterRows(*(torch.from_numpy(column).to(device) for column in columns))
    return implementation.draw_filtered(logits.to(device), rows, state).cpu()


expected = draw(layers, "cpu")
assert draw(kernels, "cuda" if torch.cuda.is_available() else "cpu").equal(expected)
assert expected[1::3].max() < 5 and expected[2::3].max() < 900 and expected[0::3].max() >= 900
with LLM("demo/austen", device="cpu", max_model_len=64) as llm:
    outputs = llm.generate(["She"] * 2, [SamplingParams(vocab_limit=600, ignore_eos=True)] * 2)
assert max(token for output in outputs for token in output["token_ids"]) < 600
"""


def test_the_example_of_adding_a_sampling_parameter_applies(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    shutil.copytree(ROOT / "nanovllm", tmp_path / "nanovllm")
    shutil.copytree(ROOT / "demo" / "austen", tmp_path / "demo" / "austen")
    page = (ROOT / "docs" / "adding_a_sampling_parameter.md").read_text()
    steps = re.split(r"^### .*`(nanovllm/.*)`$", page, flags=re.M)[1:]
    assert steps[::2] == re.findall(r"^\| `(nanovllm/.*?)` \|", page, re.M)
    for name, text in zip(steps[::2], steps[1::2], strict=True):
        source = (tmp_path / name).read_text()
        for hunk in re.findall(r"```diff\n(.*?)```", text, re.S):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            after = "".join(line[1:] for line in lines if line[0] != "-")
            assert source.count(before) == 1, f"{name} does not have once:\n{before}"
            source = source.replace(before, after)
        (tmp_path / name).write_text(source)
    # Without a GPU, conftest.py has set TRITON_INTERPRET already.
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", LIMITED_SAMPLING],
        check=True,
        cwd=tmp_path,
        env=env,
        timeout=STARTING,
    )
