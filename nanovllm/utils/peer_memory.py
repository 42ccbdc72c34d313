"""Memory on each rank's GPU that the GPUs of all ranks can read and write, through CUDA IPC.

A row is a piece of it that one program of a kernel exchanges with the other ranks; in an all-reduce
it carries one token's hidden state. The protocol is known to kernels/exchange.py.

It uses the CUDA driver's API, not torch's: torch's shared tensors come with named shared-memory
segments, which remain if a process is killed.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

# The most that a rank writes to all its peers in one message. Above that NCCL's rings are faster,
# except between two ranks.
ONE_SHOT_BYTES = 4 * 2**20
PAIR_BYTES = 16 * 2**20  # of a buffer between two ranks, which sum larger messages in turns
EMPTY_WORD = 0x80008000  # fills empty memory, as EMPTY_32 and EMPTY_16 of kernels/exchange.py
ALIGNMENT = 16  # bytes, of a row: kernels copy rows in vectors
MIN_ROW_BYTES = 1024
MIN_ROWS = 4096  # if the bytes allow: this many programs can sum a large message at once
HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_NATIVE_ATOMIC_SUPPORTED = 3


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The memory of all `size` ranks as this rank sees it, and the state of their exchanges.

    Each rank's memory is [2, size, num_rows, row_bytes]: two buffers, with the rows that each rank
    writes.

    addresses: int64 [size] on the device, each rank's memory in this process's address space.
    calls: int64 [num_rows] on the device, how often this rank has exchanged each row.
    is_aborted: int32 [1] in pinned memory; if not 0, kernels do not wait and results are arbitrary.
    """

    rank: int
    size: int
    num_rows: int
    row_bytes: int
    addresses: torch.Tensor
    calls: torch.Tensor
    is_aborted: torch.Tensor
    memory: "SharedMemory | None" = None  # owns what lies at the addresses

    def holds(self, num_rows: int, row_bytes: int) -> bool:
        """Returns whether a message of that shape fits and is small enough for one-shot."""
        most = min(self.num_rows, _max_rows(self.size, row_bytes))
        return num_rows <= most and row_bytes <= self.row_bytes

    def suits_sum(self, num_rows: int, row_bytes: int) -> bool:
        """Returns whether to sum a message of that shape here rather than by NCCL.

        Two ranks sum any number of rows here, some at a time, because NCCL would send as much.
        """
        return self.holds(1 if self.size == 2 else num_rows, row_bytes)

    def abort(self) -> None:
        """Makes kernels on this rank stop waiting for peers."""
        self.is_aborted.fill_(1)

    def close(self) -> None:
        """Frees the memory. A second call does nothing."""
        if self.memory is not None:
            self.memory.close()


def connect_peers(
    rank: int,
    size: int,
    device: torch.device,
    exchange_shape: tuple[int, int],
    all_gather: Callable[[torch.Tensor], torch.Tensor],
) -> PeerMemory | None:
    """Makes memory on every rank's GPU and opens that of the others, if all of them can share it.

    Returns None on every rank if some cannot, for instance without NVLink.

    exchange_shape: rows and bytes of a row that are needed. The result has more rows where larger
        messages gain from them, and fewer where messages of so many are better left to NCCL.
    all_gather: gathers CPU tensors from all ranks, [...] -> [size, ...].
    """
    row_bytes = -(-max(exchange_shape[1], MIN_ROW_BYTES) // ALIGNMENT) * ALIGNMENT
    most = PAIR_BYTES // row_bytes if size == 2 else _max_rows(size, row_bytes)
    num_rows = min(max(exchange_shape[0], MIN_ROWS), most)
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
    """Returns the most rows of a message that is small enough for one-shot."""
    return ONE_SHOT_BYTES // ((size - 1) * row_bytes)


def _has_direct_links(rank: int, size: int) -> bool:
    """Returns whether this GPU reaches all others by NVLink, or a link as good.

    The test is whether the link supports atomic operations, which NVLink does.
    """
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
    """Memory on the current device that other processes can open, and theirs after `open`.

    Its methods, except `close`, raise `OSError` if the driver refuses.

    addresses: one per rank, 0 for memory that is not open.
    handle: by which other processes open this rank's memory.
    """

    def __init__(self, rank: int, size: int, num_bytes: int) -> None:
        """Allocates this rank's memory and fills it with the empty value."""
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
        """Opens the memory of all other ranks, given every rank's handle."""
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
        """Waits for this GPU's work, then frees and closes all memory. A second call does nothing.

        It may be called from any thread, whatever its current device.
        """
        addresses, self.addresses = self.addresses, [0] * len(self.addresses)
        if not any(addresses):
            return
        driver = _driver()
        if driver["cuCtxPushCurrent_v2"](self._context):
            return  # the driver has shut down
        driver["cuCtxSynchronize"]()  # errors are ignored, here and below: a kernel may have failed
        for peer, address in enumerate(addresses):
            if address:
                name = "cuMemFree_v2" if peer == self._rank else "cuIpcCloseMemHandle"
                driver[name](ctypes.c_uint64(address))
        driver["cuCtxPopCurrent_v2"](ctypes.byref(ctypes.c_void_p()))


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    """Calls a function of the CUDA driver; raises `OSError` if it fails."""
    result = _driver()[name](*args)
    if result:
        raise OSError(f"{name} failed with CUDA error {result}")
