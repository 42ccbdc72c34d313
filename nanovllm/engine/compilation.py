"""Compiles kernels beside one another: Triton lets other threads run meanwhile.

A launch compiles what it needs, so these are launches of which nobody reads the results. What is
not among them is compiled by the first step that needs it, while everything waits.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nanovllm.layers.attention import Attention
from nanovllm.utils.context import Context

Launch = Callable[[], object]


def compile_together(launches: Sequence[Launch], device: torch.device) -> None:
    """Makes the launches, each in a thread, on the current stream. Kernels should be of different
    kinds: two launches would both compile one."""
    stream = torch.cuda.current_stream(device)

    def make(launch: Launch) -> None:
        with torch.cuda.stream(stream), torch.inference_mode():
            launch()

    with ThreadPoolExecutor() as pool:
        list(pool.map(make, launches))  # raises what a launch raised


def attention_launches(attention: Attention, sizes: Sequence[int]) -> list[Launch]:
    """Decode attention for so many sequences each, with empty contexts."""
    assert attention.backend is not None
    decode, caches = attention.backend.decode, (attention.k_cache, attention.v_cache)
    launches: list[Launch] = []
    for size in sizes:
        q = caches[0].new_zeros(size, attention.num_heads, attention.head_dim)
        lens = torch.zeros(size, dtype=torch.int32, device=q.device)
        tables = lens.unsqueeze(1)
        context = Context(lens.long(), lens, tables, max_seqlen_k=1)
        launches.append(partial(decode, q, *caches, attention.scale, context))
    return launches
