"""The links between the GPUs of tensor-parallel ranks: NCCL, and memory that they share.

NCCL runs in a process group of its own, which nothing else in the process knows.
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

TIMEOUT = timedelta(minutes=10)  # for slow ranks; a rank that ends is noticed at once
ABORT_SECONDS = 1.0  # how long an abort waits for an NCCL call to return
CLOSE_SECONDS = 5.0  # how long `close` waits for NCCL to end
ABORTS = "abort", "_abort", "_shutdown"  # torch's names for it; the first that exists is used
# NCCL's watchdog would end the process when a peer is lost or a collective takes too long. But the
# process is the user's, who gets an error instead: the engine watches its workers and aborts.
WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else it would poll the store's file for a dump signal
}


def has_nccl() -> bool:
    """Returns whether this build of torch includes NCCL."""
    return dist.is_available() and dist.is_nccl_available()


class PeerLostError(RuntimeError):
    """A collective failed: another rank has ended, or hangs."""


class GPULinks:
    """NCCL between the ranks' GPUs, and memory that they share where they can.

    Collectives run on the current stream, do not block the host, and can be captured.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        device: torch.device,
        exchange_shape: tuple[int, int],
        all_gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Connects the GPUs of all ranks; raises `PeerLostError` if one does not take part.

        store: the torch.distributed store through which the ranks meet.
        exchange_shape: rows of peer memory, and bytes of a row, that frequent messages need.
        all_gather: gathers CPU tensors from all ranks, [...] -> [size, ...].
        """
        self.is_aborted = False
        self.peers: PeerMemory | None = None
        self._calling = Lock()  # held during NCCL calls
        self._aborting = Lock()
        self._has_ended = Event()
        with torch.cuda.device(device):
            free = torch.cuda.mem_get_info(device)[0]
            self._nccl = _connect_nccl(rank, size, store, device)
            try:
                torch.cuda.synchronize(device)  # gives this thread a CUDA context
                self.peers = connect_peers(rank, size, device, exchange_shape, all_gather)
                self.num_bytes = free - torch.cuda.mem_get_info(device)[0]
            except BaseException:
                self.end()
                raise

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sums x over the ranks in place, by NCCL."""
        options = _on_current_stream(dist.AllreduceOptions())
        self._call(lambda: self._nccl.allreduce([x], options))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Gathers x, [...], from every rank into `out`, [size, ...], by NCCL."""
        options = _on_current_stream(dist.distributed_c10d.AllgatherOptions())  # type: ignore[attr-defined]
        self._call(lambda: self._nccl._allgather_base(out, x, options))

    def _call(self, collective: Callable[[], Any]) -> None:
        """Launches an NCCL collective; raises `PeerLostError` if it fails or after an abort."""
        with self._calling:
            if self.is_aborted:
                raise PeerLostError("another rank has ended, or hangs")
            try:
                work = collective()
            except RuntimeError as error:
                raise PeerLostError(f"NCCL failed: {error}") from error
            if work is not None:  # on NCCL's own stream: make the current stream wait for it
                work.wait()

    def abort(self) -> None:
        """Ends all waits for a peer on the GPU at once, and returns when NCCL has ended too.

        NCCL ends only after the CUDA graphs that hold its collectives are gone. A second call does
        nothing.
        """
        if not self._aborting.acquire(blocking=False):
            return
        self.is_aborted = True  # first, for results are void from now on
        if self.peers is not None:
            self.peers.abort()
        # Do not free NCCL during a call that uses it, unless that call itself seems to hang.
        if self._calling.acquire(timeout=ABORT_SECONDS):
            self._calling.release()  # the next call raises
        try:
            name = next(name for name in ABORTS if hasattr(self._nccl, name))
            getattr(self._nccl, name)()
        finally:
            self._has_ended.set()

    def close(self) -> None:
        """Frees the shared memory. Call it after `abort`, when nothing uses the links any more.

        A second call does nothing.
        """
        self._has_ended.wait(CLOSE_SECONDS)
        if self.peers is not None:
            self.peers.close()

    def end(self) -> None:
        """Aborts and closes links that nothing uses yet."""
        with suppress(RuntimeError):  # NCCL may have failed by itself
            self.abort()
        self.close()


def _connect_nccl(rank: int, size: int, store: Any, device: torch.device) -> Any:
    """Connects NCCL at once and returns its process group; raises `PeerLostError` on failure.

    A first collective would connect too, but leave a kernel that waits on the GPU for ever if
    another rank ends.
    """
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
    """Sets an NCCL collective's options so that it runs on the current stream; returns them.

    Torch before 2.8 cannot do so, and runs collectives on a stream of its own.
    """
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets environment variables within the `with` block and restores them after it."""
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
