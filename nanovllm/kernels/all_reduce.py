"""One-shot collectives between the GPUs of one host, each one kernel that a CUDA graph can capture:
an all-reduce of hidden states with the residual add and RMSNorm that follow, and an all-gather.

How programs of different ranks exchange data is known to kernels/exchange.py.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.exchange import (
    message_ptr,
    peer_arguments,
    publish_emptied,
    receive,
    sendable,
)
from nanovllm.kernels.layernorm import load_sum, rms_norm
from nanovllm.utils.peer_memory import PeerMemory

GATHER_WARPS = 4
FEW_TOKENS = 512  # about as many programs of the larger size run at once on an H200


@triton.jit(do_not_specialize=["num_tokens"])
def _all_reduce_add_rms_norm_kernel(
    x_ptr,  # [PARTS, num_tokens, size]
    residual_ptr,  # [num_tokens, size]; x_ptr if there is no residual
    weight_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    is_aborted_ptr,
    source_bytes,
    row_bytes,
    num_tokens,
    size,
    eps,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    CAN_PAUSE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    call = tl.load(calls_ptr + program)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    for token in range(program, num_tokens, tl.num_programs(0)):
        call += 1
        own_part = sendable(load_sum(x_ptr, token, num_tokens, size, cols, mask, dtype, PARTS))
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                part_ptr = message_ptr(
                    addresses_ptr, peer, call, RANK, program, source_bytes, row_bytes, out_ptr, SIZE
                )
                tl.store(part_ptr + cols, own_part, mask=mask)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + token * size + cols, mask=mask, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):  # the same order on all ranks, so that they round alike
            if rank == RANK:
                total += own_part.to(tl.float32)
            else:
                part_ptr = message_ptr(
                    addresses_ptr, RANK, call, rank, program, source_bytes, row_bytes, out_ptr, SIZE
                )
                part, call = receive(
                    part_ptr + cols, mask, call, is_aborted_ptr, THREADS, CAN_PAUSE
                )
                total += part.to(tl.float32)
        x = total.to(dtype)
        if HAS_RESIDUAL:
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + token * size + cols, x, mask=mask)
        tl.store(out_ptr + token * size + cols, rms_norm(x, weight, size, eps), mask=mask)
        if token + tl.num_programs(0) < num_tokens:
            publish_emptied(calls_ptr + program, call)
    tl.store(calls_ptr + program, call)


def sum_warps(num_tokens: int, block: int, num_ranks: int) -> int:
    """Returns the warps of a program, which sums one token's hidden state, padded to `block`, at a
    time. Fewer warps suit many tokens, which reach this kernel with two ranks only."""
    has_many = num_ranks == 2 and num_tokens > FEW_TOKENS
    return min(max(block // (1024 if has_many else 512), 1), 16)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: PeerMemory,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums x over the ranks, adds the sum to the residual and normalises the result.

    x, residual [t, size] -> (norm(sum), sum), [t, size] each; the sum replaces the contents of
    `residual`, or of x if that is None. With a residual x may come as n partial sums,
    [n, t, size].

    peers: memory whose rows hold a hidden state each. With more tokens than rows, a program sums
        several tokens in turn.
    """
    num_tokens, size = x.shape[-2:]
    assert size * weight.element_size() <= peers.row_bytes
    out = weight.new_empty(num_tokens, size)
    block = max(triton.next_power_of_2(size), 32)
    num_warps = sum_warps(num_tokens, block, peers.size)
    _all_reduce_add_rms_norm_kernel[(min(num_tokens, peers.num_rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        *peer_arguments(peers),
        num_tokens,
        size,
        eps,
        PARTS=len(x) if x.dim() == 3 else 1,
        RANK=peers.rank,
        SIZE=peers.size,
        THREADS=32 * num_warps,
        CAN_PAUSE=x.is_cuda,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out, x if residual is None else residual


@triton.jit(do_not_specialize=["num_words"])
def _all_gather_kernel(
    x_ptr,  # [num_words]
    out_ptr,  # [SIZE, num_words]
    addresses_ptr,
    calls_ptr,
    is_aborted_ptr,
    source_bytes,
    row_bytes,
    num_words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    CAN_PAUSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    words = row * (row_bytes // 8) + cols
    mask = (cols < row_bytes // 8) & (words < num_words)
    call = tl.load(calls_ptr + row) + 1
    own_part = tl.load(x_ptr + words, mask=mask)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            part_ptr = message_ptr(
                addresses_ptr, peer, call, RANK, row, source_bytes, row_bytes, out_ptr, SIZE
            )
            tl.store(part_ptr + 2 * cols, own_part & 0xFFFF, mask=mask)
            tl.store(part_ptr + 2 * cols + 1, own_part >> 16 & 0xFFFF, mask=mask)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            part = own_part
        else:
            part_ptr = message_ptr(
                addresses_ptr, RANK, call, rank, row, source_bytes, row_bytes, out_ptr, SIZE
            )
            part_ptr += 2 * cols
            low, call = receive(part_ptr, mask, call, is_aborted_ptr, THREADS, CAN_PAUSE)
            high, call = receive(part_ptr + 1, mask, call, is_aborted_ptr, THREADS, CAN_PAUSE)
            part = high << 16 | low
        tl.store(out_ptr + rank * num_words + words, part, mask=mask)
    tl.store(calls_ptr + row, call)


def all_gather(x: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """Gathers x from every rank: int32 [...] -> [ranks, ...].

    peers: memory with room for twice the bytes of x, for each word is sent as two halves, in words
        of their own that never look empty.
    """
    out = x.new_empty(peers.size, *x.shape)
    words_per_row = peers.row_bytes // 8  # 4 bytes for each half of a word
    num_rows = triton.cdiv(x.numel(), words_per_row)
    assert num_rows <= peers.num_rows
    _all_gather_kernel[(num_rows,)](
        x,
        out,
        *peer_arguments(peers),
        x.numel(),
        RANK=peers.rank,
        SIZE=peers.size,
        THREADS=32 * GATHER_WARPS,
        CAN_PAUSE=x.is_cuda,
        BLOCK=max(triton.next_power_of_2(words_per_row), 32 * GATHER_WARPS),
        num_warps=GATHER_WARPS,
    )
    return out
