"""One-to-many channel through shared memory: rank 0 sends, every other rank receives all of it.

A ring of slots with sequence numbers: the sender publishes slot after slot, each receiver
acknowledges what it has read, and a slot is rewritten only after all have. So nothing is
overwritten unread and no message costs a round trip; one larger than a slot goes in pieces.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory

NUM_SLOTS = 16
SLOT_BYTES = 64 * 1024
SLOT_HEADER_BYTES = 16  # int64 payload length, int64 whether more pieces follow
SPIN_SECONDS = 0.002


class Waiter:
    """Waits for another process's store to memory: spins first, then sleeps longer and longer.

    `check` is called now and then; it raises to end the wait.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        start = time.monotonic()
        pause = 0.0
        while not is_ready():
            if time.monotonic() - start > SPIN_SECONDS:
                self._check()
                pause = min(pause + 2e-5, 1e-3)
            time.sleep(pause)


class _Ring:
    """The layout: int64 number of published slots, one int64 of acknowledged slots per receiver,
    then the slots. Aligned 8-byte stores are atomic, and seen in order on x86-64; elsewhere the
    interpreter's own locking between the payload's store and the counter's orders them."""

    def __init__(self, memory: SharedMemory, num_receivers: int) -> None:
        assert memory.buf is not None
        header_bytes = 8 * (1 + num_receivers)
        self._header = memory.buf[:header_bytes].cast("q")
        self._slots = [
            memory.buf[header_bytes + i * SLOT_BYTES : header_bytes + (i + 1) * SLOT_BYTES]
            for i in range(NUM_SLOTS)
        ]

    @staticmethod
    def num_bytes(num_receivers: int) -> int:
        return 8 * (1 + num_receivers) + NUM_SLOTS * SLOT_BYTES

    @property
    def published(self) -> int:
        return int(self._header[0])

    def acknowledged_by_all(self) -> int:
        return min(self._header[1:])

    def write(self, piece: memoryview, has_more: bool) -> None:
        slot = self._slots[self.published % NUM_SLOTS]
        slot[:SLOT_HEADER_BYTES].cast("q")[0] = len(piece)
        slot[:SLOT_HEADER_BYTES].cast("q")[1] = has_more
        slot[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + len(piece)] = piece
        self._header[0] += 1

    def read(self, receiver: int, sequence: int) -> tuple[bytes, bool]:
        slot = self._slots[sequence % NUM_SLOTS]
        length, has_more = slot[:SLOT_HEADER_BYTES].cast("q")
        piece = bytes(slot[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + length])
        self._header[1 + receiver] = sequence + 1
        return piece, bool(has_more)

    def release(self) -> None:
        """Lets go of the memory, which cannot be closed while views of it exist."""
        for view in (self._header, *self._slots):
            view.release()


class Sender:
    """Owns the segment; its name is for the receivers. `check` may raise to end a wait."""

    def __init__(self, num_receivers: int, check: Callable[[], None]) -> None:
        self._memory = SharedMemory(create=True, size=_Ring.num_bytes(num_receivers))
        self.name = self._memory.name
        self._ring = _Ring(self._memory, num_receivers)
        self._waiter = Waiter(check)

    def send(self, message: bytes) -> None:
        """Waits only while the ring is full of slots that a receiver has not read."""
        view = memoryview(message)
        room = SLOT_BYTES - SLOT_HEADER_BYTES
        for start in range(0, max(len(view), 1), room):
            self._waiter.wait_until(
                lambda: self._ring.published - self._ring.acknowledged_by_all() < NUM_SLOTS
            )
            self._ring.write(view[start : start + room], has_more=start + room < len(view))

    def close(self) -> None:
        """Removes the segment. Idempotent."""
        self._ring.release()
        self._memory.close()
        with suppress(FileNotFoundError):
            self._memory.unlink()


class Receiver:
    """Receiver `index` of the segment `name`. `check` may raise to end a wait."""

    def __init__(
        self, name: str, num_receivers: int, index: int, check: Callable[[], None]
    ) -> None:
        self._memory = SharedMemory(name)
        self._ring = _Ring(self._memory, num_receivers)
        self._index = index
        self._next = 0
        self._waiter = Waiter(check)

    def receive(self) -> bytes:
        """The next message, in the order sent."""
        pieces, has_more = [], True
        while has_more:
            self._waiter.wait_until(lambda: self._ring.published > self._next)
            piece, has_more = self._ring.read(self._index, self._next)
            self._next += 1
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self._ring.release()
        self._memory.close()
