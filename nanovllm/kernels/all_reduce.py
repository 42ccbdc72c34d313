"""Small messages between the GPUs of one host, in one kernel each, that a CUDA graph can hold.

One-shot: every rank writes its part into the memory of each peer (the layout is that of
utils/peer_memory.py), tells them, waits for their parts, and reads those from its own memory.
Program i of a kernel deals with row i of that memory alone, and waits only for the programs i of
its peers.

Why one wait a call is enough: a row has two slots, used in turns. A rank overwrites a peer's slot
in its call s + 2 on that row, so after it has seen that peer's signal s + 1; the peer sends that
after its call s, in which it read the slot, has ended. All ranks make the same calls in the same
order.

Nobody waits for programs that cannot start: programs start in order, so the first that has not
ended runs on every rank, or will when its predecessor in the stream ends.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.kernels.layernorm import load_sum, normalised

# Between looks at host memory. Should all programs look at once it takes long, and the peers wait
# meanwhile: not so long that they look too, which would make this rank wait, and so on.
POLLS = tl.constexpr(4096)
EAGER_POLLS = tl.constexpr(64)  # before a wait is long, and a program polls less often
GATHER_WARPS = 4
NEVER = tl.constexpr(2**62)  # no sequence number comes after it


@triton.jit
def _slot(sequence, source, row, rows_offset, slot_bytes, row_bytes, SIZE: tl.constexpr):
    """Where the row of this call that comes from rank `source` is, in bytes from any address."""
    return rows_offset + ((sequence & 1) * SIZE + source) * slot_bytes + row * row_bytes


@triton.jit
def _at(addresses_ptr, rank, offset, like_ptr):
    """A pointer of the type of `like_ptr`; Triton 3.0 makes none of a constexpr."""
    address = tl.load(addresses_ptr + rank) + offset
    return tl.multiple_of(address.to(like_ptr.dtype), 16)


@triton.jit
def _is_aborted(is_aborted_ptr, THREADS: tl.constexpr):
    """As all threads see it: each looks for itself, at its own time, so the looks are combined."""
    look_ptr = is_aborted_ptr + tl.arange(0, THREADS) // THREADS
    return tl.max(tl.load(look_ptr, volatile=True), 0) != 0


@triton.jit
def _pause(polls):
    """A microsecond or so."""
    tl.inline_asm_elementwise(
        "nanosleep.u32 2000; mov.b32 $0, $1;",
        "=r,r",
        [polls],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait(flag_ptr, sequence, is_aborted_ptr, THREADS: tl.constexpr, CAN_PAUSE: tl.constexpr):
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    polls = 0
    while seen < sequence:
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        polls += 1
        if CAN_PAUSE:  # noqa: SIM102 - and a constexpr must stand alone
            if polls > EAGER_POLLS:
                _pause(polls)
        if polls % POLLS == 0:  # noqa: SIM102 - Triton evaluates both sides of `and`
            if _is_aborted(is_aborted_ptr, THREADS):
                tl.atomic_xchg(flag_ptr, NEVER)  # later waits end at once
                seen = sequence


@triton.jit
def _meet(
    addresses_ptr,
    sequence_ptr,
    is_aborted_ptr,
    row,
    sequence,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    CAN_PAUSE: tl.constexpr,  # not under the interpreter
):
    """Tells the peers that they have this program's row; returns when theirs can be read."""
    tl.debug_barrier()  # all threads have written
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags_ptr = _at(addresses_ptr, peer, 0, sequence_ptr)
            tl.atomic_xchg(flags_ptr + row * SIZE + RANK, sequence, sem="release", scope="sys")
    own_flags_ptr = _at(addresses_ptr, RANK, 0, sequence_ptr)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag_ptr = own_flags_ptr + row * SIZE + peer
            _wait(flag_ptr, sequence, is_aborted_ptr, THREADS, CAN_PAUSE)
    tl.store(sequence_ptr + row, sequence)
    tl.debug_barrier()  # no thread reads before


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
    offset = _slot(sequence, RANK, row, rows_offset, slot_bytes, row_bytes, SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(_at(addresses_ptr, peer, offset, out_ptr) + cols, own_part, mask=mask)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * size + cols, mask=mask, other=0.0).to(tl.float32)
    _meet(
        addresses_ptr, sequence_ptr, is_aborted_ptr, row, sequence, RANK, SIZE, THREADS, CAN_PAUSE
    )
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):  # in one order, so that all ranks round alike
        if rank == RANK:
            total += own_part.to(tl.float32)
        else:
            offset = _slot(sequence, rank, row, rows_offset, slot_bytes, row_bytes, SIZE)
            part_ptr = _at(addresses_ptr, RANK, offset, out_ptr) + cols
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
        *_arguments(peers),
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
    offset = _slot(sequence, RANK, row, rows_offset, slot_bytes, row_bytes, SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(_at(addresses_ptr, peer, offset, out_ptr) + cols, own_part, mask=mask)
    _meet(
        addresses_ptr, sequence_ptr, is_aborted_ptr, row, sequence, RANK, SIZE, THREADS, CAN_PAUSE
    )
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            tl.store(out_ptr + rank * num_words + words, own_part, mask=mask)
        else:
            offset = _slot(sequence, rank, row, rows_offset, slot_bytes, row_bytes, SIZE)
            part = tl.load(_at(addresses_ptr, RANK, offset, out_ptr) + cols, mask=mask)
            tl.store(out_ptr + rank * num_words + words, part, mask=mask)


def all_gather(x: torch.Tensor, peers: Any) -> torch.Tensor:
    """int32 [...] of each rank -> [ranks, ...]; peers: a `PeerMemory` that holds x."""
    out = x.new_empty(peers.size, *x.shape)
    words_per_row = peers.row_bytes // 4
    _all_gather_kernel[(triton.cdiv(x.numel(), words_per_row),)](
        x,
        out,
        *_arguments(peers),
        x.numel(),
        RANK=peers.rank,
        SIZE=peers.size,
        THREADS=32 * GATHER_WARPS,
        CAN_PAUSE=x.is_cuda,
        BLOCK=triton.next_power_of_2(words_per_row),
        num_warps=GATHER_WARPS,
    )
    return out


def _arguments(peers: Any) -> tuple[Any, ...]:
    """What every kernel here is told of a `PeerMemory`."""
    slot_bytes = peers.num_rows * peers.row_bytes
    row = (peers.rows_offset, slot_bytes, peers.row_bytes)
    return peers.addresses, peers.sequence, peers.is_aborted, *row
