"""Memory of each rank's GPU that the GPUs of all ranks read and write: CUDA IPC.

By the driver's API rather than torch's, whose shared tensors come with named segments that stay
when a process is killed. What the memory means is known to kernels/exchange.py.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

# Written to peers in a message; with more than two ranks NCCL's rings are faster above that.
ONE_SHOT_BYTES = 4 * 2**20
PAIR_BYTES = 16 * 2**20  # written to an only peer at a time, in a sum however large
EMPTY_WORD = 0x80008000  # what memory is full of where nobody has written; kernels know
ALIGNMENT = 16  # bytes: rows are copied in vectors
MIN_ROW_BYTES = 1024
MIN_ROWS = 4096  # if the bytes allow, so that as many programs can sum larger messages
HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_NATIVE_ATOMIC_SUPPORTED = 3


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Rows that the ranks exchange: [2, size, num_rows, row_bytes] at each rank's address, of which
    each of `size` entries is written by one rank.

    addresses: int64 [size] on the device, as this process sees them.
    calls: int64 [num_rows] on the device, how often this rank has exchanged each row.
    is_aborted: int32 [1] in pinned memory, not 0: nobody waits any more, results are arbitrary.
    """

    rank: int
    size: int
    num_rows: int
    row_bytes: int
    addresses: torch.Tensor
    calls: torch.Tensor
    is_aborted: torch.Tensor
    memory: "SharedMemory | None" = None  # at the addresses

    def holds(self, num_rows: int, row_bytes: int) -> bool:
        """Whether a message of that shape fits, and is small."""
        most = min(self.num_rows, _max_rows(self.size, row_bytes))
        return num_rows <= most and row_bytes <= self.row_bytes

    def suits_sum(self, num_rows: int, row_bytes: int) -> bool:
        """Whether rows are best summed here, however few it holds at a time: between two ranks
        NCCL sends as much."""
        return self.holds(1 if self.size == 2 else num_rows, row_bytes)

    def abort(self) -> None:
        self.is_aborted.fill_(1)

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        if self.memory is not None:
            self.memory.close()


def connect_peers(
    rank: int,
    size: int,
    device: torch.device,
    shape: tuple[int, int],
    all_gather: Callable[[torch.Tensor], torch.Tensor],
) -> PeerMemory | None:
    """Memory for `shape` (rows, bytes of a row) on every rank, or for as many rows as are worth it;
    None on every rank if some GPUs cannot share theirs (as those without NVLink).

    all_gather: of CPU tensors, [...] -> [size, ...].
    """
    row_bytes = -(-max(shape[1], MIN_ROW_BYTES) // ALIGNMENT) * ALIGNMENT
    most = PAIR_BYTES // row_bytes if size == 2 else _max_rows(size, row_bytes)
    num_rows = min(max(shape[0], MIN_ROWS), most)
    num_bytes = 2 * size * num_rows * row_bytes
    try:
        shared = SharedMemory(rank, size, num_bytes) if _has_direct_links(rank, size) else None
    except OSError:
        shared = None
    with ExitStack() as undo:
        if shared is not None:
            undo.callback(shared.close)
        handle = shared.handle if shared is not None else bytes(HANDLE_BYTES)
        handles = all_gather(torch.tensor(list(handle), dtype=torch.uint8, device="cpu"))
        is_able = bool(handles.any(dim=1).all())
        if shared is not None and is_able:
            try:
                shared.open([bytes(row.tolist()) for row in handles])
            except OSError:
                is_able = False
        are_able = all_gather(torch.tensor(int(is_able), device="cpu"))
        if shared is None or not are_able.all():
            return None
        peers = PeerMemory(
            rank=rank,
            size=size,
            num_rows=num_rows,
            row_bytes=row_bytes,
            addresses=torch.tensor(shared.addresses, dtype=torch.int64, device=device),
            calls=torch.zeros(num_rows, dtype=torch.int64, device=device),
            is_aborted=torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True),
            memory=shared,
        )
        undo.pop_all()
        return peers


def _max_rows(size: int, row_bytes: int) -> int:
    """How many are still small enough a message for this to be the best way."""
    return ONE_SHOT_BYTES // ((size - 1) * row_bytes)


def _has_direct_links(rank: int, size: int) -> bool:
    """Whether this GPU has NVLink, or as good, to all others: atomic operations work across it."""
    value = ctypes.c_int()
    for peer in range(size):
        if peer != rank:
            _call(
                "cuDeviceGetP2PAttribute", ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, rank, peer
            )
            if not value.value:
                return False
    return True


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class SharedMemory:
    """Empty memory on the current device, and the other ranks' once `open` has been called.

    `OSError` if the driver refuses.
    """

    def __init__(self, rank: int, size: int, num_bytes: int) -> None:
        self._rank = rank
        self.addresses = [0] * size
        self._context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        address, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.addresses[rank] = address.value
        try:
            _call(
                "cuMemsetD32_v2",
                address,
                ctypes.c_uint(EMPTY_WORD),
                ctypes.c_size_t(num_bytes // 4),
            )
            _call("cuCtxSynchronize")
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except OSError:
            self.close()
            raise
        self.handle = ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)

    def open(self, handles: list[bytes]) -> None:
        for peer, handle in enumerate(handles):
            if peer != self._rank:
                address = ctypes.c_uint64()
                _call(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(address),
                    _Handle.from_buffer_copy(handle),
                    ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
                )
                self.addresses[peer] = address.value

    def close(self) -> None:
        """Waits for what uses it on this GPU. Idempotent; in any thread, whatever its device."""
        addresses, self.addresses = self.addresses, [0] * len(self.addresses)
        if not any(addresses):
            return
        driver = _driver()
        if driver["cuCtxPushCurrent_v2"](self._context):
            return  # it has shut down
        driver["cuCtxSynchronize"]()  # whatever it returns, as below: a kernel may have failed
        for peer, address in enumerate(addresses):
            if address:
                name = "cuMemFree_v2" if peer == self._rank else "cuIpcCloseMemHandle"
                driver[name](ctypes.c_uint64(address))
        driver["cuCtxPopCurrent_v2"](ctypes.byref(ctypes.c_void_p()))


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    result = _driver()[name](*args)
    if result:
        raise OSError(f"{name} failed with CUDA error {result}")
