"""Tests that new weights give the new model's ids, and that wrong ones leave the old in use."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import GREEDY, Ids, greedy_ids, make_llm, make_paged_llm

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
PROMPTS = [[5, 6, 7], [300] * 20]
RANKS = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "GPU": {"device": "cuda"},
    "GPU, half precision": {"device": "cuda", "dtype": "bfloat16", "autotune_matmul": False},
    "two GPUs": {"device": "cuda", "tensor_parallel_size": 2},
}
MARKS = {
    "GPU": [pytest.mark.gpu],
    "GPU, half precision": [pytest.mark.gpu],
    "two GPUs": [pytest.mark.gpu2],
}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def is_tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, is_tied: bool) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("weights")
    old, new = (
        make_checkpoint(
            path / str(seed), seed=seed, tie_word_embeddings=is_tied, attention_bias=True
        )
        for seed in (0, 1)
    )
    return old, new


@pytest.fixture(scope="module", params=[pytest.param(r, marks=MARKS.get(r, ())) for r in RANKS])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return RANKS[request.param]


@pytest.fixture(scope="module")
def ids(checkpoints: tuple[Path, Path], config: dict[str, Any]) -> list[list[Ids]]:
    """Returns the ids of engines that were made with the old and with the new weights."""
    found = []
    for path in checkpoints:
        with make_paged_llm(path, **config) as llm:
            found.append(greedy_ids(llm, PROMPTS, 12))
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def shared_llm(checkpoints: tuple[Path, Path], config: dict[str, Any]) -> Iterator[LLM]:
    with make_paged_llm(checkpoints[0], **config) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM, checkpoints: tuple[Path, Path], ids: list[list[Ids]]) -> Iterator[LLM]:
    """Provides an engine with the old weights, and gives it these back after the test."""
    assert greedy_ids(shared_llm, PROMPTS, 12) == ids[0], "the cache is warm"
    yield shared_llm
    shared_llm.update_weights(checkpoints[0])


def weights_of(path: Path) -> Weights:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("form", ["directory", "text", "pairs", "generator", "fp64", "device"])
def test_new_weights_give_the_new_ids(
    llm: LLM, checkpoints: tuple[Path, Path], ids: list[list[Ids]], form: str
) -> None:
    new = checkpoints[1]
    device = llm.config.torch_device
    forms: dict[str, Any] = {
        "directory": new,
        "text": str(new),
        "pairs": list(weights_of(new).items()),
        "generator": (pair for pair in weights_of(new).items()),
        "fp64": [(name, tensor.double()) for name, tensor in weights_of(new).items()],
        "device": [(name, tensor.to(device)) for name, tensor in weights_of(new).items()],
    }
    llm.update_weights(forms[form])
    assert greedy_ids(llm, PROMPTS, 12) == ids[1]
    assert greedy_ids(llm, PROMPTS, 12) == ids[1]


def without(weights: Weights, name: str) -> Weights:
    return {n: tensor for n, tensor in weights.items() if n != name}


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": (lambda w: without(w, NORM), ValueError, f"lacks tensors .*{NORM}"),
    "unknown": (lambda w: w | {"model.x": w[NORM]}, ValueError, "does not know: model.x"),
    "shape": (lambda w: w | {NORM: w[NORM][1:]}, ValueError, f"{NORM}.*shape is .63., .* .64."),
    "packed": (
        lambda w: w | {(k := "model.layers.1.self_attn.k_proj.weight"): w[k][:-1]},
        ValueError,
        "k_proj.*shape is .31, 64., the config asks for .32, 64.",
    ),
    "integers": (lambda w: w | {NORM: w[NORM].int()}, ValueError, f"{NORM}' in torch.int32"),
    "no tensors": (lambda w: w.keys(), TypeError, "pairs of name and tensor, got '"),
    "no names": (lambda w: list(enumerate(w.values())), TypeError, "pairs of name and tensor"),
    "nothing": (lambda _: [], ValueError, "lacks tensors"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights_leave_the_old_in_use(
    llm: LLM, checkpoints: tuple[Path, Path], ids: list[list[Ids]], case: str
) -> None:
    edit, error, pattern = WRONG[case]
    wrong = edit(weights_of(checkpoints[1]))
    with pytest.raises(error, match=pattern):
        llm.update_weights(wrong.items() if isinstance(wrong, dict) else wrong)
    assert greedy_ids(llm, PROMPTS, 12) == ids[0]


def test_a_wrong_directory_leaves_the_old_in_use(
    llm: LLM, ids: list[list[Ids]], is_tied: bool, tmp_path: Path
) -> None:
    other = make_checkpoint(
        tmp_path / "other", tie_word_embeddings=is_tied, attention_bias=True, intermediate_size=64
    )
    for path, pattern in (
        (other, r"_proj.*shape is .64, 64."),
        (tmp_path, "has no .*safetensors file"),
    ):
        with pytest.raises(ValueError, match=pattern):
            llm.update_weights(path)
        assert greedy_ids(llm, PROMPTS, 12) == ids[0]


def test_a_name_that_comes_twice(llm: LLM, checkpoints: tuple[Path, Path]) -> None:
    pairs = [*weights_of(checkpoints[1]).items()]
    with pytest.raises(ValueError, match=r"'.*' twice"):
        llm.update_weights([*pairs, pairs[0]])


def test_a_head_beside_tied_embeddings(
    llm: LLM, checkpoints: tuple[Path, Path], ids: list[list[Ids]], is_tied: bool
) -> None:
    if not is_tied:
        pytest.skip("the head is a weight of its own")
    weights = weights_of(checkpoints[1])
    with pytest.raises(ValueError, match=r"lm_head.weight differs from .* ties them"):
        llm.update_weights((weights | {HEAD: weights[EMBEDDING] + 1}).items())
    assert greedy_ids(llm, PROMPTS, 12) == ids[0]
    llm.update_weights((weights | {HEAD: weights[EMBEDDING]}).items())
    assert greedy_ids(llm, PROMPTS, 12) == ids[1]


def test_refused_while_requests_run(
    llm: LLM, checkpoints: tuple[Path, Path], ids: list[list[Ids]]
) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match=r"2 requests still run .*end, or abort them"):
        llm.update_weights(checkpoints[1])
    stream.close()
    llm.update_weights(checkpoints[1])
    assert greedy_ids(llm, PROMPTS, 12) == ids[1]


def test_wider_weights_are_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    """On a CPU without bfloat16 the layers compute with fp32 copies of bfloat16 weights."""
    new = make_checkpoint(tmp_path / "new", seed=1)
    with make_llm(new, dtype="bfloat16") as llm:
        expected = greedy_ids(llm, PROMPTS, 12)
    with make_llm(make_checkpoint(tmp_path / "old"), dtype="bfloat16") as llm:
        llm.update_weights(weights_of(new).items())
        assert greedy_ids(llm, PROMPTS, 12) == expected


def test_the_caller_keeps_the_tensors(tiny_qwen3: Path, tmp_path: Path) -> None:
    weights = weights_of(Path(shutil.copytree(tiny_qwen3, tmp_path / "copy")))
    with make_paged_llm(tiny_qwen3) as llm:
        expected = greedy_ids(llm, PROMPTS, 12)
        llm.update_weights(weights.items())
        for tensor in weights.values():
            tensor.zero_()
        assert greedy_ids(llm, PROMPTS, 12) == expected


def test_the_prefix_cache_can_be_reset_at_any_time(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    expected = greedy_ids(llm, PROMPTS, 12)
    for when in range(6):
        ids: dict[int, Ids] = {}
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
        for step in range(100):
            if step == when:
                llm.reset_prefix_cache()
                assert not llm.scheduler.block_manager._published
            ids.update(llm.step()[0])
            llm.scheduler.block_manager.check_integrity(llm.scheduler.running.values())
            if llm.is_finished():
                break
        assert [ids[i] for i in sorted(ids)] == expected
    llm.reset_prefix_cache()
    llm.add_request(PROMPTS[1], GREEDY)
    _, num_first = llm.step()
    assert num_first + llm.step()[1] == len(PROMPTS[1])


@pytest.mark.gpu
def test_graphs_with_chosen_matmuls_use_the_new_weights(checkpoints: tuple[Path, Path]) -> None:
    old, new = checkpoints
    with make_paged_llm(old, device="cuda", dtype="bfloat16") as llm:
        assert llm._runner is not None
        pointers = [param.data_ptr() for param in llm._runner.model.parameters()]
        before = greedy_ids(llm, PROMPTS, 12)
        llm.update_weights(new)
        assert greedy_ids(llm, PROMPTS, 12) != before
        llm.update_weights((n, tensor.cuda()) for n, tensor in weights_of(old).items())
        assert greedy_ids(llm, PROMPTS, 12) == before
        assert [param.data_ptr() for param in llm._runner.model.parameters()] == pointers
