"""Tests the forms in which prompts may come."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer

from nanovllm import LLM
from nanovllm.engine.prompts import PromptReader, as_batch
from tests.helpers.engines import GREEDY, greedy_ids, make_paged_llm

IDS = [5, 6, 7]
TEXT = "introduce yourself"
OF_IDS: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "array": np.array(IDS),
    "array of 16 bits": np.array(IDS, np.uint16),
    "tensor": torch.tensor(IDS),
    "tensor of 32 bits": torch.tensor(IDS, dtype=torch.int32),
    "dict": {"prompt_token_ids": IDS},
    "dict with a tensor": {"prompt_token_ids": torch.tensor(IDS)},
}


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3)


@pytest.mark.parametrize("form", OF_IDS)
def test_one_such_thing_is_one_prompt(llm: LLM, form: str) -> None:
    expected = greedy_ids(llm, [IDS], 12)
    prompt = OF_IDS[form]
    (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    both = llm.generate([prompt, TEXT], GREEDY, use_tqdm=False)
    in_tuple = llm.generate((prompt, TEXT), GREEDY, use_tqdm=False)
    assert [alone["token_ids"]] == [both[0]["token_ids"]] == expected
    assert both == in_tuple
    assert alone["prompt_token_ids"] == IDS
    seq_id = llm.add_request(prompt, GREEDY)
    while not llm.is_finished():
        ended = dict(llm.step()[0])
    assert ended == {seq_id: expected[0]}


def test_texts_in_dicts_and_tuples(llm: LLM) -> None:
    expected = llm.generate([TEXT], GREEDY, use_tqdm=False)
    for prompts in ({"prompt": TEXT}, [{"prompt": TEXT}], (TEXT,)):
        assert llm.generate(prompts, GREEDY, use_tqdm=False) == expected
    assert llm.generate((), GREEDY) == as_batch([]) == []


def test_the_callers_ids_are_copied(llm: LLM) -> None:
    ids = np.array(IDS)
    seq_id = llm.add_request(ids, GREEDY)
    ids[:] = 9
    while not llm.is_finished():
        ended = dict(llm.step()[0])
    assert [ended[seq_id]] == greedy_ids(llm, [IDS], 12)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_is_not_doubled(tiny_qwen3: Path, adds_bos: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    tokenizer.bos_token = "<|im_start|>"
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
        )
    reader = PromptReader("m", tokenizer, vocab_size=512, max_model_len=64)
    plain = tokenizer.encode("list", add_special_tokens=False)

    def ids(text: str) -> "array[int]":
        return reader.token_ids(text, "prompt")

    assert list(ids("list")) == [0] * adds_bos + plain
    assert list(ids("<|im_start|>list")) == [0, *plain]
    assert list(ids("<|im_start|><|im_start|>list")) == [0, 0, *plain], "as the text says"
    assert list(ids("<|im_start|>")) == [0]
