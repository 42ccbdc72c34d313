"""Tests loading the weights of experts, a tensor for each or stacked, on one rank or several."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nanovllm.layers.moe import Experts
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import load_model
from tests.helpers.checkpoints import make_checkpoint

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts"
NUM_EXPERTS, SIZE, INNER = 5, 64, 48


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "Qwen3MoeForCausalLM", with_tokenizer=False)


def experts_of(checkpoint: Path, group: TPGroup) -> Experts:
    """Loads a rank's model and returns the experts of its second layer."""
    hf_config = AutoConfig.from_pretrained(checkpoint)
    model = Qwen3MoeForCausalLM(hf_config, group, tie_word_embeddings=True)
    for param in model.parameters():
        torch.nn.init.constant_(param, float("nan"))
    load_model(model, Checkpoint(checkpoint), model.packed_modules_mapping)
    assert not any(param.isnan().any() for param in model.parameters() if not param.is_mkldnn)
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, Experts)
    return experts


def stacked(tensors: Tensors) -> Tensors:
    """Returns the tensors with those of the experts stacked, gates before ups."""
    names = {name for name in tensors if ".experts." in name}
    out = {name: tensor for name, tensor in tensors.items() if name not in names}
    for prefix in {name.split(".experts.")[0] + ".experts" for name in names}:
        gates, ups, downs = (
            torch.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(NUM_EXPERTS)])
            for part in ("gate", "up", "down")
        )
        out[f"{prefix}.gate_up_proj"] = torch.cat((gates, ups), dim=1)
        out[f"{prefix}.down_proj"] = downs
    return out


@pytest.mark.parametrize("is_stacked", [False, True])
def test_shares_of_the_ranks_make_up_the_checkpoint(is_stacked: bool, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    expected = stacked(load_file(file))
    if is_stacked:
        save_file(expected, file, {"format": "pt"})
    for size in (1, 2, 4):
        ranks = [experts_of(checkpoint, TPGroup(rank, size)) for rank in range(size)]
        gates, ups = zip(*(rank.gate_up_proj.chunk(2, dim=1) for rank in ranks), strict=True)
        assert torch.equal(torch.cat(gates + ups, dim=1), expected[f"{EXPERTS}.gate_up_proj"])
        downs = torch.cat([rank.down_proj for rank in ranks], dim=2)
        assert torch.equal(downs, expected[f"{EXPERTS}.down_proj"])


def test_a_missing_and_an_unknown_expert_are_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors, name = load_file(file), f"{EXPERTS}.4.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks tensors that its config asks for: {name}$"):
        experts_of(checkpoint, TPGroup())
    extra = f"{EXPERTS}.5.up_proj.weight"
    save_file(tensors | {extra: tensors[name].clone()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"does not know: {extra}"):
        experts_of(checkpoint, TPGroup())


@pytest.mark.parametrize(
    ("name", "shape", "asked"),
    [
        ("2.gate_proj.weight", [INNER + 1, SIZE], [INNER, SIZE]),
        ("0.down_proj.weight", [INNER, SIZE], [SIZE, INNER]),
        ("gate_up_proj", [NUM_EXPERTS, INNER, SIZE], [NUM_EXPERTS, 2 * INNER, SIZE]),
        ("down_proj", [NUM_EXPERTS + 1, SIZE, INNER], [NUM_EXPERTS, SIZE, INNER]),
    ],
)
def test_a_wrong_shape_is_refused(
    name: str, shape: list[int], asked: list[int], checkpoint: Path
) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    if not name.endswith("weight"):
        tensors = stacked(tensors)
    tensors[f"{EXPERTS}.{name}"] = torch.zeros(shape)
    save_file(tensors, file, {"format": "pt"})
    message = f"{EXPERTS}.{name}': its shape is {shape}, the config asks for {asked}"
    with pytest.raises(ValueError, match=re.escape(message)):
        experts_of(checkpoint, TPGroup())
