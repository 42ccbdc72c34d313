"""Provides prompts and Hugging Face's completions of them."""

from pathlib import Path

import pytest

from tests.helpers.engines import NUM_TOKENS, Ids
from tests.helpers.reference import HuggingFace


@pytest.fixture(scope="session")
def prompts(ragged_prompts: list[Ids]) -> list[Ids]:
    """Returns 6 prompts of at most 40 ids."""
    return [prompt[:40] for prompt in ragged_prompts[:6]]


@pytest.fixture(scope="session")
def hf_ids(tiny_qwen3: Path, prompts: list[Ids]) -> list[Ids]:
    """Returns Hugging Face's `NUM_TOKENS` greedy ids after each of `prompts`."""
    reference = HuggingFace(tiny_qwen3)
    return [reference.greedy(prompt, NUM_TOKENS, stop=frozenset()) for prompt in prompts]
