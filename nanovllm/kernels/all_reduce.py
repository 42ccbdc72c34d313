"""Small messages between the GPUs of one host, in one kernel each, that a CUDA graph can hold: the
sum of hidden states with the norm that follows, and a gather. How ranks meet: kernels/exchange.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.exchange import arguments, at, meet, slot
from nanovllm.kernels.layernorm import load_sum, normalised

GATHER_WARPS = 4


@triton.jit
def _all_reduce_add_rms_norm_kernel(
    x_ptr,  # [PARTS, num_rows, size]
    residual_ptr,  # [num_rows, size]; x_ptr if there is none
    weight_ptr,
    out_ptr,
    addresses_ptr,
    sequence_ptr,
    is_aborted_ptr,
    rows_offset,
    slot_bytes,
    row_bytes,
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
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    sequence = tl.load(sequence_ptr + row) + 1
    own_part = load_sum(x_ptr, size, cols, mask, dtype, PARTS)
    offset = slot(sequence, RANK, row, rows_offset, slot_bytes, row_bytes, SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(at(addresses_ptr, peer, offset, out_ptr) + cols, own_part, mask=mask)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * size + cols, mask=mask, other=0.0).to(tl.float32)
    meet(addresses_ptr, sequence_ptr, is_aborted_ptr, row, sequence, RANK, SIZE, THREADS, CAN_PAUSE)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):  # in one order, so that all ranks round alike
        if rank == RANK:
            total += own_part.to(tl.float32)
        else:
            offset = slot(sequence, rank, row, rows_offset, slot_bytes, row_bytes, SIZE)
            part_ptr = at(addresses_ptr, RANK, offset, out_ptr) + cols
            total += tl.load(part_ptr, mask=mask, other=0.0).to(tl.float32)
    x = total.to(dtype)
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + residual).to(dtype)
    tl.store(residual_ptr + row * size + cols, x, mask=mask)
    tl.store(out_ptr + row * size + cols, normalised(x, weight, size, eps), mask=mask)


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, peers: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of the sum of all ranks' x, of which `residual` (or else x) takes the sum.

    x, residual [t, size]; x may come in parts, fp32 [n, t, size], with a residual.
    peers: a `PeerMemory` that holds rows of x.
    """
    num_rows, size = x.shape[-2:]
    out = weight.new_empty(num_rows, size)
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // 512, 1), 16)
    _all_reduce_add_rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        *arguments(peers),
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
    sequence_ptr,
    is_aborted_ptr,
    rows_offset,
    slot_bytes,
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
    words = row * (row_bytes // 4) + cols
    mask = (cols < row_bytes // 4) & (words < num_words)
    sequence = tl.load(sequence_ptr + row) + 1
    own_part = tl.load(x_ptr + words, mask=mask)
    offset = slot(sequence, RANK, row, rows_offset, slot_bytes, row_bytes, SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(at(addresses_ptr, peer, offset, out_ptr) + cols, own_part, mask=mask)
    meet(addresses_ptr, sequence_ptr, is_aborted_ptr, row, sequence, RANK, SIZE, THREADS, CAN_PAUSE)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            tl.store(out_ptr + rank * num_words + words, own_part, mask=mask)
        else:
            offset = slot(sequence, rank, row, rows_offset, slot_bytes, row_bytes, SIZE)
            part = tl.load(at(addresses_ptr, RANK, offset, out_ptr) + cols, mask=mask)
            tl.store(out_ptr + rank * num_words + words, part, mask=mask)


def all_gather(x: torch.Tensor, peers: Any) -> torch.Tensor:
    """int32 [...] of each rank -> [ranks, ...]; peers: a `PeerMemory` that holds x."""
    out = x.new_empty(peers.size, *x.shape)
    words_per_row = peers.row_bytes // 4
    _all_gather_kernel[(triton.cdiv(x.numel(), words_per_row),)](
        x,
        out,
        *arguments(peers),
        x.numel(),
        RANK=peers.rank,
        SIZE=peers.size,
        THREADS=32 * GATHER_WARPS,
        CAN_PAUSE=x.is_cuda,
        BLOCK=triton.next_power_of_2(words_per_row),
        num_warps=GATHER_WARPS,
    )
    return out
