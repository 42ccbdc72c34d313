"""Compiles Triton kernels side by side: Triton lets other threads run while it compiles.

A kernel is compiled by its first call, so this makes calls whose results nobody reads. A kernel
that is not among them is compiled by the first step that needs it, while everything waits.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nanovllm.layers.attention import Attention
from nanovllm.utils.context import Context

KernelCall = Callable[[], object]


def compile_together(calls: Sequence[KernelCall], device: torch.device) -> None:
    """Makes the calls, each in a thread, on the current stream; raises what one of them raised.

    Each should need another kernel: two threads would both compile the same one.
    """
    stream = torch.cuda.current_stream(device)

    def make(call: KernelCall) -> None:
        with torch.cuda.stream(stream), torch.inference_mode():
            call()

    with ThreadPoolExecutor() as pool:
        list(pool.map(make, calls))


def decode_attention_calls(attention: Attention, sizes: Sequence[int]) -> list[KernelCall]:
    """Returns calls of decode attention for batches of these sizes, with empty contexts."""
    assert attention.backend is not None
    decode, cache = attention.backend.decode, attention.cache
    calls: list[KernelCall] = []
    for size in sizes:
        q = cache.k.new_zeros(size, attention.num_heads, attention.head_dim)
        lens = torch.zeros(size, dtype=torch.int32, device=q.device)
        context = Context(lens.long(), lens, lens.unsqueeze(1), max_seqlen_k=1)
        calls.append(partial(decode, q, cache, attention.scale, context))
    return calls
