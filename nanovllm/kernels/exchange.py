"""How programs of a kernel exchange rows with those of the same kernel on other ranks.

One-shot: every rank writes its part into the memory of each peer (utils/peer_memory.py), and waits
for theirs in its own. The data are their own signal: memory is empty, which is a value too, until
they come, and who has read them empties it again. So a wait is as long as one way, as in NCCL's
protocol LL, whose flags lie between the data. Program i of a kernel deals with row i of that memory
alone. It has at least as many columns as threads: of a value that two of them hold, one might see
what the other does not yet.

Why nothing is overwritten that is still to be read or emptied: a row has two slots, used in turns.
A rank writes into a peer's slot in its call s + 2 on that row, so once it has what the peer sent in
its call s + 1; before that the peer emptied the slot, in its call s, and `settle` or the end of a
kernel came between.

Why nobody waits for programs that cannot start: programs start in order, so the first that has not
ended runs on every rank, or will when its predecessor in the stream ends. All ranks make the same
calls in the same order.
"""

from typing import Any

import triton
import triton.language as tl

from nanovllm.utils.peer_memory import PeerMemory

# Between looks at host memory. Should all programs look at once it takes long, and the peers wait
# meanwhile: not so long that they look too, which would make this rank wait, and so on.
POLLS = tl.constexpr(4096)
EAGER_POLLS = tl.constexpr(64)  # before a wait is long, and a program polls less often
NEVER = tl.constexpr(2**62)  # calls that wait no more are counted from here
EMPTY_32 = tl.constexpr(0x80008000 - 2**32)  # a tiny negative number as fp32
EMPTY_16 = tl.constexpr(0x8000 - 2**16)  # half of it, -0.0


@triton.jit
def slot(
    addresses_ptr, holder, call, source, row, slot_bytes, row_bytes, like_ptr, SIZE: tl.constexpr
):
    """Where rank `holder` gets the row that rank `source` sends in this call; a pointer of the type
    of `like_ptr`. Triton 3.0 makes none of a constexpr."""
    offset = ((call & 1) * SIZE + source) * slot_bytes + row * row_bytes
    address = tl.load(addresses_ptr + holder) + offset
    return tl.multiple_of(address.to(like_ptr.dtype), 16)


@triton.jit
def _empty(dtype: tl.constexpr):
    """What each value of memory is where nobody has written, [1]."""
    is_half: tl.constexpr = dtype.primitive_bitwidth == 16
    bits = tl.full([1], EMPTY_16 if is_half else EMPTY_32, tl.int16 if is_half else tl.int32)
    return bits.to(dtype, bitcast=True)


@triton.jit
def _is_empty(x):
    word: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    return x.to(word, bitcast=True) == _empty(word)


@triton.jit
def sendable(x):
    """x, with 0 for what would look empty."""
    return tl.where(_is_empty(x), tl.zeros_like(x), x)


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
def receive(ptr, mask, call, is_aborted_ptr, THREADS: tl.constexpr, CAN_PAUSE: tl.constexpr):
    """(what a peer has sent to `ptr`, which is empty afterwards; the number of this call, or one
    from NEVER on if nobody waits any more and the data are arbitrary)

    CAN_PAUSE: not under the interpreter.
    """
    tl.debug_barrier()  # what was to be sent is on its way
    x = tl.load(ptr, mask=mask, other=0, volatile=True)
    num_empty = tl.sum(_is_empty(x).to(tl.int32), 0)
    polls = 0
    while (num_empty > 0) & (call < NEVER):
        x = tl.load(ptr, mask=mask, other=0, volatile=True)
        num_empty = tl.sum(_is_empty(x).to(tl.int32), 0)
        polls += 1
        if CAN_PAUSE:  # noqa: SIM102 - and a constexpr must stand alone
            if polls > EAGER_POLLS:
                _pause(polls)
        if polls % POLLS == 0:  # noqa: SIM102 - Triton evaluates both sides of `and`
            if _is_aborted(is_aborted_ptr, THREADS):
                call += NEVER
    tl.store(ptr, _empty(x.dtype), mask=mask)
    return x, call


@triton.jit
def settle(call_ptr, call):
    """For a program that goes on to another call: what it has emptied is so for all GPUs."""
    tl.debug_barrier()  # all threads have written
    tl.atomic_xchg(call_ptr, call, sem="release", scope="sys")
    tl.debug_barrier()  # no thread sends before


def arguments(peers: PeerMemory) -> tuple[Any, ...]:
    """What a kernel that exchanges rows is told of a `PeerMemory`."""
    slot_bytes = peers.num_rows * peers.row_bytes
    return peers.addresses, peers.calls, peers.is_aborted, slot_bytes, peers.row_bytes
