"""Tests that what a caller has set in torch neither reaches the engine nor is changed by it."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from nanovllm import LLM, SamplingParams
from tests.helpers.engines import GREEDY, make_llm, make_paged_llm

PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 8]
SPECIAL = SamplingParams(
    n=2, seed=1, top_k=5, top_p=0.9, logprobs=2, prompt_logprobs=1, presence_penalty=0.1
)


class Doubling(TorchFunctionMode):
    """Is a user's mode that changes what torch computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func in (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul)
        return result * 2 if is_product else result


@contextmanager
def setting(set_: Callable[[Any], object], value: Any, usual: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(usual)


def state() -> list[Any]:
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch._C._len_torch_function_stack(),
        torch.random.get_rng_state().device,
        random.getstate(),
        str(np.random.get_state()),
        torch.default_generator.get_state().tolist()
        if not torch.is_inference_mode_enabled()
        else 0,
    ]


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "default dtype fp64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bf16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "grad mode": torch.enable_grad,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "precision": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "threads": lambda: setting(torch.set_num_threads, 3, torch.get_num_threads()),
    "function mode": Doubling,
}


def results(llm: LLM, given: list[tuple[str, torch.Tensor]]) -> list[Any]:
    outputs = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)
    llm.update_weights(given)
    outputs += llm.generate(list(PROMPTS), [SPECIAL, GREEDY], use_tqdm=False)
    deltas = list(llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=3)))
    return [outputs, deltas]


@pytest.fixture(scope="module")
def given(tiny_qwen3: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return list(load_file(tiny_qwen3 / "model.safetensors").items())


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3)


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, given: list[tuple[str, torch.Tensor]]) -> list[Any]:
    return results(make_paged_llm(tiny_qwen3), given)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_do_not_reach_the_engine_nor_change(
    name: str, llm: LLM, tiny_qwen3: Path, given: list[Any], expected: list[Any]
) -> None:
    """Both an engine from before and one that is made while it is set."""
    with SETTINGS[name]():
        before = state()
        made = make_paged_llm(tiny_qwen3)
        assert results(made, given) == expected
        assert results(llm, given)[0][:2] == expected[0][:2]
        made.exit()
        assert state() == before


def test_settings_do_not_reach_two_ranks(tiny_qwen3: Path, given: list[Any]) -> None:
    with make_llm(tiny_qwen3) as one:
        expected = results(one, given)[0][0]["token_ids"]
    with SETTINGS["default device"](), SETTINGS["default dtype fp64"](), SETTINGS["autocast"]():
        before = state()
        with make_llm(tiny_qwen3, tensor_parallel_size=2) as two:
            assert results(two, given)[0][0]["token_ids"] == expected
        assert state() == before
