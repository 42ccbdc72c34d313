"""The one-shot protocol by which a kernel exchanges data with the same kernel on other ranks.

Every rank writes its part into each peer's memory (utils/peer_memory.py), and waits for the peers'
parts in its own. The data are their own flags: memory holds a reserved value, "empty", until data
arrive, and the reader empties it again. So a message costs one transfer and no acknowledgement, as
in NCCL's protocol LL, which interleaves flags with the data.

A row is the piece of that memory that one program uses: program i uses row i and no other. A row
has at least as many columns as a program has threads. Otherwise two threads would poll the same
value, and one might see it before the other.

Why nothing is overwritten before it is read and emptied: each row has two buffers, used in turns.
A rank writes to a peer's buffer of call s again in call s + 2, after it has received what the peer
sent in call s + 1. The peer emptied the buffer before it sent that, in call s, and published it by
`publish_emptied` or by the end of a kernel.

Why no program waits for one that cannot start: programs start in order, so the first program that
has not ended either runs on every rank, or will run once the kernel before it in the stream ends.
All ranks make the same calls in the same order.
"""

from typing import Any

import triton
import triton.language as tl

from nanovllm.utils.peer_memory import PeerMemory

# Polls between two reads of the abort flag in host memory. These are slow if all programs read at
# once. Rare reads keep the peers, which wait meanwhile, from reading too and so delaying this rank.
POLLS = tl.constexpr(4096)
EAGER_POLLS = tl.constexpr(64)  # polls without a pause; a longer wait polls less often
NEVER = tl.constexpr(2**62)  # an abort adds it to a call's number: calls from here on do not wait
EMPTY_32 = tl.constexpr(0x80008000 - 2**32)  # empty, 32 bits: a tiny negative fp32
EMPTY_16 = tl.constexpr(0x8000 - 2**16)  # empty, 16 bits: half of the above, -0.0


@triton.jit
def message_ptr(
    addresses_ptr, holder, call, source, row, source_bytes, row_bytes, like_ptr, SIZE: tl.constexpr
):
    """Returns a pointer to the row in rank `holder`'s memory that rank `source` writes in `call`.

    It has the type of `like_ptr`, because Triton 3.0 cannot make a pointer type from a constexpr.
    """
    offset = ((call & 1) * SIZE + source) * source_bytes + row * row_bytes
    address = tl.load(addresses_ptr + holder) + offset
    return tl.multiple_of(address.to(like_ptr.dtype), 16)


@triton.jit
def _empty(dtype: tl.constexpr):
    """Returns the empty value of a 16-bit or 32-bit dtype, [1]."""
    is_half: tl.constexpr = dtype.primitive_bitwidth == 16
    bits = tl.full([1], EMPTY_16 if is_half else EMPTY_32, tl.int16 if is_half else tl.int32)
    return bits.to(dtype, bitcast=True)


@triton.jit
def _is_empty(x):
    """Returns whether each value of x has the bits of the empty value."""
    word: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    return x.to(word, bitcast=True) == _empty(word)


@triton.jit
def sendable(x):
    """Returns x with 0 in place of values that a receiver would take for empty memory."""
    return tl.where(_is_empty(x), tl.zeros_like(x), x)


@triton.jit
def _is_aborted(is_aborted_ptr, THREADS: tl.constexpr):
    """Returns whether the abort flag is set, the same for all threads of the program.

    Each thread reads the flag at its own time, so the reads are combined.
    """
    look_ptr = is_aborted_ptr + tl.arange(0, THREADS) // THREADS
    return tl.max(tl.load(look_ptr, volatile=True), 0) != 0


@triton.jit
def _pause(polls):
    """Suspends the thread for a few microseconds."""
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
    """Waits for a peer's data at `ptr`, empties that memory, and returns (data, call).

    call: the number of this call. After an abort it is NEVER or more, there is no wait, and the
        data are arbitrary.
    CAN_PAUSE: False under the interpreter, which cannot run inline assembly.
    """
    tl.debug_barrier()  # all threads have sent before any waits
    x = tl.load(ptr, mask=mask, other=0, volatile=True)
    num_empty = tl.sum(_is_empty(x).to(tl.int32), 0)
    polls = 0
    while (num_empty > 0) & (call < NEVER):
        x = tl.load(ptr, mask=mask, other=0, volatile=True)
        num_empty = tl.sum(_is_empty(x).to(tl.int32), 0)
        polls += 1
        if CAN_PAUSE:  # noqa: SIM102 - a constexpr condition must stand alone
            if polls > EAGER_POLLS:
                _pause(polls)
        if polls % POLLS == 0:  # noqa: SIM102 - Triton evaluates both sides of `and`
            if _is_aborted(is_aborted_ptr, THREADS):
                call += NEVER
    tl.store(ptr, _empty(x.dtype), mask=mask)
    return x, call


@triton.jit
def publish_emptied(call_ptr, call):
    """Publishes to all GPUs, before the program's next call, that it has emptied what it read."""
    tl.debug_barrier()  # all threads have emptied their values
    tl.atomic_xchg(call_ptr, call, sem="release", scope="sys")
    tl.debug_barrier()  # no thread sends anything before the exchange above


def peer_arguments(peers: PeerMemory) -> tuple[Any, ...]:
    """Returns the arguments that describe `peers` to a kernel, `addresses_ptr` to `row_bytes`."""
    source_bytes = peers.num_rows * peers.row_bytes  # of one buffer, from one rank
    return peers.addresses, peers.calls, peers.is_aborted, source_bytes, peers.row_bytes
