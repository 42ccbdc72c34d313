"""The ways between the GPUs of tensor-parallel ranks: NCCL, and memory that they share.

NCCL by a process group of its own, which nothing else in the process knows of.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Lock
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.utils.peer_memory import PeerMemory, connect_peers

TIMEOUT = timedelta(minutes=10)  # for ranks that differ in speed; a peer's end is noticed at once
ABORT_SECONDS = 1.0  # for a call of NCCL to return
CLOSE_SECONDS = 5.0  # for NCCL to end
ABORTS = "abort", "_abort", "_shutdown"  # what torch calls it: the first that there is
# NCCL's watchdog ends the process if a peer is lost or it is not served in time. This process is
# the user's, who gets an error instead: the engine itself watches its workers and aborts.
WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would look for a dump signal in the store's file
}


def has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


class PeerLostError(RuntimeError):
    """A collective failed: another rank has ended, or hangs."""


class GPULinks:
    """The ways between the ranks' GPUs: NCCL, and if they can share memory, that.

    Everything runs on the current stream, without a wait of the host, and can be captured.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        device: torch.device,
        rows: tuple[int, int],
        all_gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """store: torch.distributed's, through which the ranks meet. rows: number and bytes of the
        rows that are often exchanged, and all_gather: of CPU tensors, both for `PeerMemory`."""
        self.is_aborted = False
        self.peers: PeerMemory | None = None
        self._calling = Lock()  # NCCL
        self._aborting = Lock()
        self._has_ended = Event()
        with torch.cuda.device(device):
            free = torch.cuda.mem_get_info(device)[0]
            self._nccl = _connect_nccl(rank, size, store, device)
            try:
                torch.cuda.synchronize(device)  # this thread has a context now
                self.peers = connect_peers(rank, size, device, rows, all_gather)
                self.num_bytes = free - torch.cuda.mem_get_info(device)[0]
            except BaseException:
                self.end()
                raise

    def all_reduce(self, x: torch.Tensor) -> None:
        options = _on_current_stream(dist.AllreduceOptions())
        self._call(lambda: self._nccl.allreduce([x], options))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        options = _on_current_stream(dist.distributed_c10d.AllgatherOptions())  # type: ignore[attr-defined]
        self._call(lambda: self._nccl._allgather_base(out, x, options))

    def _call(self, collective: Callable[[], Any]) -> None:
        with self._calling:
            if self.is_aborted:
                raise PeerLostError("another rank has ended, or hangs")
            try:
                work = collective()
            except RuntimeError as error:
                raise PeerLostError(f"NCCL failed: {error}") from error
            if work is not None:  # it runs on a stream of its own: have the current one wait
                work.wait()

    def abort(self) -> None:
        """Ends what waits for a peer on the GPU, at once; returns when NCCL has ended too, for
        which the graphs with its collectives must have gone. A second call does nothing."""
        if not self._aborting.acquire(blocking=False):
            return
        self.is_aborted = True  # first: results are void from now on
        if self.peers is not None:
            self.peers.abort()
        # Not during a call, which would use what is freed; but a call may be what hangs.
        if self._calling.acquire(timeout=ABORT_SECONDS):
            self._calling.release()  # the next call raises
        try:
            name = next(name for name in ABORTS if hasattr(self._nccl, name))
            getattr(self._nccl, name)()
        finally:
            self._has_ended.set()

    def close(self) -> None:
        """Once aborted, and with nothing left that would use it. Idempotent."""
        self._has_ended.wait(CLOSE_SECONDS)
        if self.peers is not None:
            self.peers.close()

    def end(self) -> None:
        """For links that nothing uses yet."""
        with suppress(RuntimeError):  # NCCL may have found out itself
            self.abort()
        self.close()


def _connect_nccl(rank: int, size: int, store: Any, device: torch.device) -> Any:
    """Connects now, and with nothing on the GPU, where a wait for a rank that ends would stay."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    store = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
    try:
        with _environment(WATCHDOG_OFF):
            nccl: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        nccl.eager_connect_single_device(device)
    except RuntimeError as error:
        raise PeerLostError(f"NCCL could not connect rank {rank}: {error}") from error
    return nccl


def _on_current_stream(options: Any) -> Any:
    """As the options of NCCL collectives; torch before 2.8 has a stream of its own for them."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the block."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
