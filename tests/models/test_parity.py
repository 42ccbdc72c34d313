"""Tests that logits and greedy ids equal those of Hugging Face."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import make_checkpoint, rope_fields
from tests.helpers.closeness import assert_logits_close
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.reference import HuggingFace, next_token_logits

CASES: dict[str, dict[str, Any]] = {
    "qwen3-tied": {},
    "qwen3-untied": {"tie_word_embeddings": False},
    "qwen3-biases": {"attention_bias": True},
    "qwen3-wide-heads": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 40},
    "qwen2-tied": {"architecture": "Qwen2ForCausalLM"},
    "qwen2-untied": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": False},
    "qwen3-moe": {"architecture": "Qwen3MoeForCausalLM", "norm_topk_prob": True},
    "qwen3-moe-some-layers": {
        "architecture": "Qwen3MoeForCausalLM",
        "norm_topk_prob": False,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "llama-tied": {"architecture": "LlamaForCausalLM"},
    "llama-biases": {
        "architecture": "LlamaForCausalLM",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "llama3-scaled": {
        "architecture": "LlamaForCausalLM",
        "max_position_embeddings": 256,
        **rope_fields(
            5e4,
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    },
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 256},
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), **CASES[request.param])


def test_logits_and_greedy_ids_equal_hugging_face(
    checkpoint: Path, ragged_prompts: list[list[int]]
) -> None:
    prompts = ragged_prompts[16:]
    reference = HuggingFace(checkpoint)
    with make_llm(checkpoint, device="auto", max_model_len=256) as llm:
        logits = next_token_logits(llm, prompts)
        ids = greedy_ids(llm, prompts, max_tokens=64)
    expected_logits = torch.stack([reference.last_logits(prompt) for prompt in prompts])
    assert_logits_close(logits, expected_logits)
    expected = [reference.greedy(prompt, 64, stop=frozenset()) for prompt in prompts]
    assert ids == expected
    assert len({token for completion in ids for token in completion}) > 50, "degenerate text"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_logits_are_close(
    dtype: torch.dtype, tiny_qwen3: Path, ragged_prompts: list[list[int]]
) -> None:
    prompts = ragged_prompts[:8]
    reference = HuggingFace(tiny_qwen3)
    with make_llm(tiny_qwen3, device="auto", dtype=dtype) as llm:
        logits = next_token_logits(llm, prompts)
    expected = torch.stack([reference.last_logits(prompt) for prompt in prompts])
    assert_logits_close(logits, expected, dtype)


@pytest.mark.slow
def test_real_checkpoint_answers_as_hugging_face() -> None:
    """NANOVLLM_TEST_MODEL names a chat checkpoint of a supported architecture, which runs in
    fp32."""
    path = os.environ.get("NANOVLLM_TEST_MODEL")
    if path is None:
        pytest.skip("NANOVLLM_TEST_MODEL is not set")
    questions = [
        "What is the capital of France?",
        "Write one sentence about the sea.",
        "List three colours.",
        "Who wrote Pride and Prejudice?",
        "Explain in short what a prime number is.",
    ]
    reference = HuggingFace(path)
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "kvcache_block_size": 256}
    with make_llm(path, device="auto", dtype="float32", num_kvcache_blocks=16, **sizes) as llm:
        assert llm.tokenizer is not None
        prompts = []
        for question in questions:
            text = llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            prompts.append(llm.tokenizer.encode(text))
        ids = greedy_ids(llm, prompts, max_tokens=40, ignore_eos=False)
        stop = llm.scheduler.stop_token_ids
        for question, completion in zip(questions, ids, strict=True):
            print(f"{question!r} -> {llm.tokenizer.decode(completion)!r}")
    assert ids == [reference.greedy(prompt, 40, stop) for prompt in prompts]
