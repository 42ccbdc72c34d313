"""A one-to-many channel through shared memory: rank 0 sends, every other rank receives everything.

It is a ring of slots with sequence numbers. The sender publishes slot after slot, each receiver
acknowledges what it has read, and a slot is rewritten only after all receivers have. So nothing is
overwritten unread, and no message costs a round trip. A message larger than a slot goes in pieces.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass
from threading import Lock

from nanovllm.utils.waiting import Check, wait_until

NUM_SLOTS = 16
SLOT_BYTES = 64 * 1024
SLOT_HEADER_BYTES = 16  # int64 payload length, int64 whether more pieces follow

_fence_lock = Lock()


@dataclass(frozen=True, slots=True)
class Channel:
    """What a receiver must know of a channel.

    fd: the descriptor of the shared memory, which a receiver's process inherits. It is a file
        without a name, so that nothing is left behind, whatever ends the processes.
    """

    fd: int
    num_receivers: int
    num_slots: int
    slot_bytes: int

    @property
    def header_bytes(self) -> int:
        return 8 * (1 + self.num_receivers)

    @property
    def num_bytes(self) -> int:
        return self.header_bytes + self.num_slots * self.slot_bytes


class Sender:
    """The sending end, rank 0's. It takes all memory at once, so that a lack of it shows here."""

    def __init__(
        self, num_receivers: int, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        directory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - close() closes it
        self.channel = Channel(self._file.fileno(), num_receivers, num_slots, slot_bytes)
        self._file.write(bytes(self.channel.num_bytes))
        self._file.flush()
        self._ring = _Ring(self.channel)

    def send(self, message: bytes, check: Check) -> None:
        """Sends a message; waits only while the ring is full of slots that somebody has not read.

        `check` is called while it waits. If that raises, part of the message may have been sent.
        """
        view = memoryview(message)
        room = self.channel.slot_bytes - SLOT_HEADER_BYTES
        for start in range(0, max(len(view), 1), room):
            wait_until(self._ring.has_room, check)
            self._ring.write(view[start : start + room], has_more=start + room < len(view))

    def close(self) -> None:
        """Frees this end. A second call does nothing."""
        self._ring.close()
        self._file.close()


class Receiver:
    """The receiving end of one rank; `index` counts the receivers from 0."""

    def __init__(self, channel: Channel, index: int) -> None:
        self._ring = _Ring(channel)
        self._index = index
        self._next = 0

    def receive(self, check: Check = lambda: None) -> bytes:
        """Returns the next message, in the order sent; `check` is called while there is none.

        If that raises, nothing is lost unless pieces of the message had come.
        """
        pieces, has_more = list[bytes](), True
        while has_more:
            wait_until(lambda: self._ring.published > self._next, check)
            piece, has_more = self._ring.read(self._index, self._next)
            self._next += 1
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Frees this end. A second call does nothing."""
        self._ring.close()


class _Ring:
    """The layout of the shared memory.

    First comes the number of published slots, int64, then one int64 for each receiver with the
    slots that it has acknowledged, then the slots. Aligned stores of 8 bytes are atomic, and fences
    keep them in order with the payload.
    """

    def __init__(self, channel: Channel) -> None:
        self._memory = mmap.mmap(channel.fd, channel.num_bytes)
        view = memoryview(self._memory)
        self._header = view[: channel.header_bytes].cast("q")
        starts = [channel.header_bytes + i * channel.slot_bytes for i in range(channel.num_slots)]
        self._slots = [view[start : start + channel.slot_bytes] for start in starts]

    @property
    def published(self) -> int:
        return int(self._header[0])

    def has_room(self) -> bool:
        return self.published - min(self._header[1:]) < len(self._slots)

    def write(self, piece: memoryview, has_more: bool) -> None:
        _fence()
        slot = self._slots[self.published % len(self._slots)]
        slot[:SLOT_HEADER_BYTES].cast("q")[0] = len(piece)
        slot[:SLOT_HEADER_BYTES].cast("q")[1] = has_more
        slot[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + len(piece)] = piece
        _fence()
        self._header[0] += 1

    def read(self, receiver: int, sequence: int) -> tuple[bytes, bool]:
        _fence()
        slot = self._slots[sequence % len(self._slots)]
        length, has_more = slot[:SLOT_HEADER_BYTES].cast("q")
        piece = bytes(slot[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + length])
        _fence()
        self._header[1 + receiver] = sequence + 1
        return piece, bool(has_more)

    def close(self) -> None:
        """Releases all views first: the memory cannot be closed while there are any."""
        for view in (self._header, *self._slots):
            view.release()
        self._memory.close()


def _fence() -> None:
    """Keeps memory accesses before and after it apart, on any processor.

    POSIX (4.12, Memory Synchronization) promises that of locking a mutex.
    """
    with _fence_lock:
        pass
