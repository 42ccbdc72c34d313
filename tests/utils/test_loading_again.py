"""Tests that a model can be loaded a second time, into the layouts that it computes with."""

from pathlib import Path

import pytest
import torch

from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.loader import load_model
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.closeness import assert_logits_close
from tests.helpers.engines import make_llm
from tests.helpers.reference import next_token_logits

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
        ("float16", "float16"),
    ],
)
def test_a_second_load_gives_the_other_checkpoints_logits(
    stored: str, dtype: str, is_tied: bool, tmp_path: Path
) -> None:
    first, second = (
        make_checkpoint(
            tmp_path / str(seed), seed=seed, dtype=getattr(torch, stored),
            tie_word_embeddings=is_tied, attention_bias=True,
        )
        for seed in (0, 1)
    )  # fmt: skip
    with make_llm(second, dtype=dtype, enable_prefix_caching=False) as llm:
        expected = next_token_logits(llm, [PROMPT])
    with make_llm(first, dtype=dtype, enable_prefix_caching=False) as llm:
        assert llm._runner is not None
        model = llm._runner.model
        assert not torch.equal(next_token_logits(llm, [PROMPT]), expected)
        layouts = [(param.layout, param.dtype) for param in model.parameters()]
        for _ in range(2):
            with torch.inference_mode():
                load_model(model, Checkpoint(second), model.packed_modules_mapping)
            assert torch.equal(next_token_logits(llm, [PROMPT]), expected)
        assert [(param.layout, param.dtype) for param in model.parameters()] == layouts


def test_a_checkpoint_of_another_shape_leaves_a_model_that_computes(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "first")
    other = make_checkpoint(tmp_path / "other", num_hidden_layers=3)
    with make_llm(first, enable_prefix_caching=False) as llm:
        expected = next_token_logits(llm, [PROMPT])
        model = llm._runner.model
        unknown = pytest.raises(ValueError, match="tensors that its architecture does not know")
        with torch.inference_mode(), unknown:
            load_model(model, Checkpoint(other), model.packed_modules_mapping)
        assert_logits_close(next_token_logits(llm, [PROMPT]), expected)
