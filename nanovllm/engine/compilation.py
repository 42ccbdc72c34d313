"""Compiles Triton kernels side by side: Triton lets other threads run while it compiles.

A kernel is compiled by its first call, so this makes calls whose results nobody reads. A kernel
that is not among them is compiled by the first step that needs it, while everything waits.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.layers.attention import Attention
from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.models.causal_lm import CausalLM
from nanovllm.utils.context import Context, SharedPrefixes

KernelCall = Callable[[], object]


def compile_together(calls: Sequence[KernelCall], device: torch.device) -> None:
    """Makes the calls, each in a thread, on the current stream; raises what one of them raised.

    Each should need another kernel: two threads would both compile the same one.
    """
    stream = torch.cuda.current_stream(device)

    def make(call: KernelCall) -> None:
        with torch.cuda.stream(stream), torch.inference_mode():
            call()

    # Tensor descriptors need the device's context to be the thread's current one, which any call
    # of CUDA's runtime makes it.
    with ThreadPoolExecutor(initializer=partial(torch.cuda.synchronize, device)) as pool:
        list(pool.map(make, calls))


def decode_attention_calls(
    attention: Attention, sizes: Sequence[int], dtype: torch.dtype
) -> list[KernelCall]:
    """Returns calls of decode attention for batches of these sizes, with empty contexts, without
    and with shared prefixes.

    dtype: of the queries.
    """
    assert attention.backend is not None
    decode, cache = attention.backend.decode, attention.cache
    calls: list[KernelCall] = []
    for size in sizes:
        q = cache.k.new_zeros(size, attention.num_heads, attention.head_dim, dtype=dtype)
        lens = torch.zeros(size, dtype=torch.int32, device=q.device)
        nothing = SharedPrefixes(lens.new_zeros(1, 5), lens, lens.new_zeros(size, 3))
        for prefixes in (None, nothing):
            context = Context(
                lens.long(), lens, lens.unsqueeze(1), max_seqlen_k=1, shared_prefixes=prefixes
            )
            calls.append(partial(decode, q, cache, attention.scale, context))
    return calls


def prefill_attention_calls(
    attention: Attention, batches: Iterable[ScheduledBatch], dtype: torch.dtype
) -> list[KernelCall]:
    """Returns calls of prefill attention with the sizes of these batches, all sequences empty.

    dtype: of the queries.
    """
    assert attention.backend is not None
    prefill, cache = attention.backend.prefill, attention.cache
    calls: list[KernelCall] = []
    for part in (batch.prefill for batch in batches):
        if part is None:
            continue
        shape = part.num_tokens, attention.num_heads, attention.head_dim
        q = cache.k.new_zeros(shape, dtype=dtype)
        k, v = q.new_zeros(2, part.num_tokens, attention.num_kv_heads, attention.head_dim)
        lens = torch.zeros(len(part.rows), dtype=torch.int32, device=q.device)
        cu_seqlens = lens.new_zeros(len(lens) + 1)
        context = Context(
            slot_mapping=lens.long(),
            context_lens=lens,
            block_tables=lens.unsqueeze(1) if part.chunks[0].start else None,
            max_seqlen_k=part.max_context_len,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
        )
        calls.append(partial(prefill, q, k, v, cache, attention.scale, context))
    return calls


def expert_calls(model: CausalLM) -> list[KernelCall]:
    """Returns calls of what a mixture of experts needs, if the model has any; all are alike."""
    mixtures = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    mixture = next(mixtures, None)
    return mixture.launches() if mixture is not None else []
