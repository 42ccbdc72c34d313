"""Messages between the GPUs of one host, in one kernel each, that a CUDA graph can hold: the sum of
hidden states with the norm that follows, and a gather. How ranks meet: kernels/exchange.py.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.exchange import arguments, receive, sendable, settle, slot
from nanovllm.kernels.layernorm import load_sum, normalised
from nanovllm.utils.peer_memory import PeerMemory

GATHER_WARPS = 4
FEW_ROWS = 512  # about as many as run at once on an H200, with more threads for each


@triton.jit(do_not_specialize=["num_rows"])
def _all_reduce_add_rms_norm_kernel(
    x_ptr,  # [PARTS, num_rows, size]
    residual_ptr,  # [num_rows, size]; x_ptr if there is none
    weight_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    is_aborted_ptr,
    slot_bytes,
    row_bytes,
    num_rows,
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
    for row in range(program, num_rows, tl.num_programs(0)):
        call += 1
        own_part = sendable(load_sum(x_ptr, row, num_rows, size, cols, mask, dtype, PARTS))
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                part_ptr = slot(
                    addresses_ptr, peer, call, RANK, program, slot_bytes, row_bytes, out_ptr, SIZE
                )
                tl.store(part_ptr + cols, own_part, mask=mask)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * size + cols, mask=mask, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):  # in one order, so that all ranks round alike
            if rank == RANK:
                total += own_part.to(tl.float32)
            else:
                part_ptr = slot(
                    addresses_ptr, RANK, call, rank, program, slot_bytes, row_bytes, out_ptr, SIZE
                )
                part, call = receive(
                    part_ptr + cols, mask, call, is_aborted_ptr, THREADS, CAN_PAUSE
                )
                total += part.to(tl.float32)
        x = total.to(dtype)
        if HAS_RESIDUAL:
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * size + cols, x, mask=mask)
        tl.store(out_ptr + row * size + cols, normalised(x, weight, size, eps), mask=mask)
        if row + tl.num_programs(0) < num_rows:
            settle(calls_ptr + program, call)
    tl.store(calls_ptr + program, call)


def sum_warps(num_rows: int, block: int, num_ranks: int) -> int:
    """Per row: fewer for many rows, as only two ranks sum here."""
    has_many = num_ranks == 2 and num_rows > FEW_ROWS
    return min(max(block // (1024 if has_many else 512), 1), 16)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: PeerMemory,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of the sum of all ranks' x, of which `residual` (or else x) takes the sum.

    x, residual [t, size]; x may come in parts, fp32 [n, t, size], with a residual.
    peers: a `PeerMemory` that holds some rows of x; a program sums those that fall to it in turn.
    """
    num_rows, size = x.shape[-2:]
    assert size * weight.element_size() <= peers.row_bytes
    out = weight.new_empty(num_rows, size)
    block = max(triton.next_power_of_2(size), 32)
    num_warps = sum_warps(num_rows, block, peers.size)
    _all_reduce_add_rms_norm_kernel[(min(num_rows, peers.num_rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        *arguments(peers),
        num_rows,
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
    words = row * (row_bytes // 8) + cols
    mask = (cols < row_bytes // 8) & (words < num_words)
    call = tl.load(calls_ptr + row) + 1
    own_part = tl.load(x_ptr + words, mask=mask)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            part_ptr = slot(
                addresses_ptr, peer, call, RANK, row, slot_bytes, row_bytes, out_ptr, SIZE
            )
            tl.store(part_ptr + 2 * cols, own_part & 0xFFFF, mask=mask)
            tl.store(part_ptr + 2 * cols + 1, own_part >> 16 & 0xFFFF, mask=mask)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            part = own_part
        else:
            part_ptr = slot(
                addresses_ptr, RANK, call, rank, row, slot_bytes, row_bytes, out_ptr, SIZE
            )
            part_ptr += 2 * cols
            low, call = receive(part_ptr, mask, call, is_aborted_ptr, THREADS, CAN_PAUSE)
            high, call = receive(part_ptr + 1, mask, call, is_aborted_ptr, THREADS, CAN_PAUSE)
            part = high << 16 | low
        tl.store(out_ptr + rank * num_words + words, part, mask=mask)
    tl.store(calls_ptr + row, call)


def all_gather(x: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """int32 [...] of each rank -> [ranks, ...]; peers: a `PeerMemory` that holds twice x: words are
    sent as halves, of which none looks empty."""
    out = x.new_empty(peers.size, *x.shape)
    words_per_row = peers.row_bytes // 8
    num_rows = triton.cdiv(x.numel(), words_per_row)
    assert num_rows <= peers.num_rows
    _all_gather_kernel[(num_rows,)](
        x,
        out,
        *arguments(peers),
        x.numel(),
        RANK=peers.rank,
        SIZE=peers.size,
        THREADS=32 * GATHER_WARPS,
        CAN_PAUSE=x.is_cuda,
        BLOCK=max(triton.next_power_of_2(words_per_row), 32 * GATHER_WARPS),
        num_warps=GATHER_WARPS,
    )
    return out
