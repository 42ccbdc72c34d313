"""How the programs of a kernel exchange rows with those of the same kernel on other ranks.

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

import triton
import triton.language as tl

# Between looks at host memory. Should all programs look at once it takes long, and the peers wait
# meanwhile: not so long that they look too, which would make this rank wait, and so on.
POLLS = tl.constexpr(4096)
EAGER_POLLS = tl.constexpr(64)  # before a wait is long, and a program polls less often
NEVER = tl.constexpr(2**62)  # no sequence number comes after it


@triton.jit
def slot(sequence, source, row, rows_offset, slot_bytes, row_bytes, SIZE: tl.constexpr):
    """Where the row of this call that comes from rank `source` is, in bytes from any address."""
    return rows_offset + ((sequence & 1) * SIZE + source) * slot_bytes + row * row_bytes


@triton.jit
def at(addresses_ptr, rank, offset, like_ptr):
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
def meet(
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
            flags_ptr = at(addresses_ptr, peer, 0, sequence_ptr)
            tl.atomic_xchg(flags_ptr + row * SIZE + RANK, sequence, sem="release", scope="sys")
    own_flags_ptr = at(addresses_ptr, RANK, 0, sequence_ptr)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag_ptr = own_flags_ptr + row * SIZE + peer
            _wait(flag_ptr, sequence, is_aborted_ptr, THREADS, CAN_PAUSE)
    tl.store(sequence_ptr + row, sequence)
    tl.debug_barrier()  # no thread reads before


def arguments(peers: Any) -> tuple[Any, ...]:
    """What a kernel that exchanges rows is told of a `PeerMemory`."""
    slot_bytes = peers.num_rows * peers.row_bytes
    row = (peers.rows_offset, slot_bytes, peers.row_bytes)
    return peers.addresses, peers.sequence, peers.is_aborted, *row
