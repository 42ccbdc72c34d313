"""Tests which layers of Qwen3-MoE have experts, and the refusal of impossible experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.models import model_outline
from nanovllm.utils.distributed import TPGroup
from tests.helpers.checkpoints import edit_json, make_checkpoint


def layers_with_experts(hf_config: PretrainedConfig, size: int = 1) -> list[int]:
    group = TPGroup(0, size)
    model: Any = model_outline(hf_config, group, max_model_len=64, tie_word_embeddings=True)
    return [i for i, x in enumerate(model.model.layers) if isinstance(x.mlp, MixtureOfExperts)]


@pytest.fixture(scope="module")
def hf_config(tmp_path_factory: pytest.TempPathFactory) -> PretrainedConfig:
    path = tmp_path_factory.mktemp("qwen3-moe")
    make_checkpoint(path, "Qwen3MoeForCausalLM", num_hidden_layers=7, with_tokenizer=False)
    config: PretrainedConfig = AutoConfig.from_pretrained(path)
    return config


@pytest.fixture
def config(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy that the test may change."""
    return type(hf_config).from_dict(hf_config.to_dict())


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("mlp_only", [[], [1, 5], None])
def test_layers_with_experts_are_those_of_hugging_face(
    step: int, mlp_only: list[int] | None, config: PretrainedConfig
) -> None:
    config.decoder_sparse_step, config.mlp_only_layers = step, mlp_only
    layers = layers_with_experts(config)
    config.mlp_only_layers = mlp_only or []
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    assert layers == [i for i, x in enumerate(reference.model.layers) if hasattr(x.mlp, "experts")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6 must lie between 1 and num_experts=5"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be an int from 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be an int from 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an int from 1"),
        ({"num_experts": 10**9}, "num_(local_)?experts must be an int from 1 to 10000"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_impossible_experts_are_refused(
    changes: dict[str, Any], message: str, config: PretrainedConfig
) -> None:
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        layers_with_experts(config)


def test_experts_that_do_not_divide_by_the_ranks_are_refused(config: PretrainedConfig) -> None:
    config.moe_intermediate_size = 47
    with pytest.raises(ValueError, match="moe_intermediate_size=47 does not divide by"):
        layers_with_experts(config, size=2)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_either_spelling_of_the_number_of_experts_is_read(name: str, tmp_path: Path) -> None:
    """Transformers 4 writes and reads the first, transformers 5 writes the second."""
    make_checkpoint(tmp_path, "Qwen3MoeForCausalLM", with_tokenizer=False)
    spellings = {"num_experts": None, "num_local_experts": None}
    edit_json(tmp_path / "config.json", **(spellings | {name: 5}))
    model: Any = model_outline(
        AutoConfig.from_pretrained(tmp_path),
        TPGroup(),
        max_model_len=64,
        tie_word_embeddings=True,
    )
    assert len(model.model.layers[0].mlp.experts.down_proj) == 5
