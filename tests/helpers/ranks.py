"""Gives tests access to the parts of engines of several ranks, and makes requests whose results
must not depend on the number of ranks."""

from pathlib import Path
from typing import Any

import psutil
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.executor import TensorParallelExecutor
from nanovllm.engine.workers import Worker
from tests.helpers.engines import Ids, make_llm

NUM_MIXED_TOKENS = 16
# These sums exceed the memory that GPUs share for small ones, so every way to sum is used.
LONG = [[token % 500 for token in range(i, i + 900)] for i in range(8)]
LONG_SIZES = {"max_model_len": 1024, "num_kvcache_blocks": 2048}


def parallel(llm: LLM) -> TensorParallelExecutor:
    assert isinstance(llm._runner, TensorParallelExecutor)
    return llm._runner


def parts(llm: LLM) -> tuple[Any, list[Worker]]:
    """Returns rank 0's runner and the workers of the other ranks."""
    ranks = parallel(llm)._ranks
    return ranks.runner, ranks.workers._workers


def worker_processes() -> list[psutil.Process]:
    """Returns the children of this process that are ranks."""
    children = psutil.Process().children()
    return [c for c in children if "spawn_main" in " ".join([c.name(), *c.cmdline()])]


def mixed_params(count: int) -> list[SamplingParams]:
    """Returns greedy and sampled parameters in turns, each with a seed of its own."""
    num = NUM_MIXED_TOKENS
    return [
        SamplingParams(temperature=0.9 * (i % 2), max_tokens=num, ignore_eos=True, seed=i)
        for i in range(count)
    ]


def mixed_ids(llm: LLM, prompts: list[Ids]) -> list[Ids]:
    outputs = llm.generate(list(prompts), mixed_params(len(prompts)), use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def ids_of_one_rank(checkpoint: Path, prompts: list[Ids], **config: Any) -> list[Ids]:
    """Returns the `mixed_ids` of an engine of one rank that has no prefix cache and waits for each
    step."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False}
    with make_llm(checkpoint, **plain, **config) as llm:
        return mixed_ids(llm, prompts)


def capture_logits(llm: LLM) -> list[torch.Tensor]:
    """Records rank 0's share of the logits, [rows, share], of each step from now on."""
    captured: list[torch.Tensor] = []
    is_alone = llm.config.tensor_parallel_size == 1
    runner: Any = llm._runner if is_alone else parallel(llm)._ranks.runner
    runner.sampler.register_forward_pre_hook(lambda _, args: captured.append(args[0].float()))
    return captured
