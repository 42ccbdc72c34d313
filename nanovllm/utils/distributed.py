"""The ranks that share a model's layers. Layers get a `TPGroup` and never ask a global.

The only user of torch.distributed, and of its process-group objects alone: the default group of the
process is the user's. Gloo joins CPUs and exchanges what only the hosts must know, NCCL joins GPUs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Lock
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.utils.peer_memory import PeerMemory, connect_peers

TIMEOUT = timedelta(minutes=10)  # for ranks that differ in speed; a peer's end is noticed at once
PIECE = timedelta(seconds=0.2)
ABORT_SECONDS = 1.0  # for a call of NCCL to return
CLOSE_SECONDS = 5.0  # for NCCL to end
ABORTS = "abort", "_abort", "_shutdown"  # what torch calls it: the first that there is
CPU = torch.device("cpu")
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
        self, group: "TPGroup", store: Any, device: torch.device, rows: tuple[int, int]
    ) -> None:
        """rows: number and bytes of the rows that are often exchanged, for `PeerMemory`."""
        self.is_aborted = False
        self.peers: PeerMemory | None = None
        self._calling = Lock()  # NCCL
        self._aborting = Lock()
        self._has_ended = Event()
        with torch.cuda.device(device):
            free = torch.cuda.mem_get_info(device)[0]
            self._nccl = _connect_nccl(group, store, device)
            try:
                torch.cuda.synchronize(device)  # this thread has a context now
                self.peers = connect_peers(group.rank, group.size, device, rows, group.all_gather)
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


@dataclass(frozen=True, slots=True)
class TPGroup:
    """This rank's place among `size` tensor-parallel ranks, and their collectives.

    With one rank there is no process group, and every collective is the identity.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None
    links: GPULinks | None = None

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        store_file: str,
        device: torch.device = CPU,
        rows: tuple[int, int] = (0, 0),
    ) -> "TPGroup":
        """Meets the other ranks through a file of their own, which none needs afterwards.

        rows: number and bytes of the rows that the ranks will often exchange.
        """
        store = dist.FileStore(store_file, size)  # type: ignore[attr-defined]
        store.set_timeout(TIMEOUT)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        try:
            group = cls(rank, size, dist.ProcessGroupGloo(store, rank, size, options))
        except RuntimeError as error:
            raise PeerLostError(f"rank {rank} of {size} could not meet the others") from error
        group.min(rank)  # until all have met
        if device.type == "cuda":
            group = cls(rank, size, group.process_group, GPULinks(group, store, device, rows))
        return group

    @property
    def peers(self) -> PeerMemory | None:
        """Memory for one-shot exchanges between GPUs, if there is any."""
        return None if self.links is None else self.links.peers

    def sums_in_norm(self, num_rows: int, row_bytes: int) -> bool:
        """Whether a norm of so many rows can sum what it gets, over the ranks and over parts."""
        return self.size == 1 or (self.peers is not None and self.peers.holds(num_rows, row_bytes))

    @property
    def gpu_bytes(self) -> int:
        """GPU memory that the links between the ranks have taken."""
        return 0 if self.links is None else self.links.num_bytes

    def check(self) -> None:
        """Raises `PeerLostError` once the GPUs no longer wait for one another."""
        if self.links is not None and self.links.is_aborted:
            raise self._peer_lost()

    def share(self, total: int, what: str) -> int:
        """This rank's share of `total`, which must divide evenly; `what` names it in the error."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks, in place."""
        if self.size == 1 or x.numel() == 0:
            return x
        if x.is_cuda and self.links is not None:
            self.links.all_reduce(x)
        else:
            self._complete(self.process_group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of each rank -> [size, ...]"""
        out = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            out[0] = x
        elif x.is_cuda and self.links is not None:
            self.links.all_gather(out, x)
        else:
            self._complete(self.process_group.allgather([list(out.unbind())], [x]))
        return out

    def min(self, value: int) -> int:
        """The smallest of the ranks' values; no rank returns before all have called."""
        return int(self.all_gather(torch.tensor(value, device="cpu")).min())

    def _complete(self, work: Any) -> None:
        """Waits, in pieces: Python serves signals only between them."""
        while not work.is_completed():
            with suppress(RuntimeError):  # the piece is over, or the work has failed
                work.wait(PIECE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._peer_lost() from error

    def _peer_lost(self) -> PeerLostError:
        return PeerLostError(
            f"rank {self.rank} of {self.size} has lost another: it ended, or hangs"
        )


def _connect_nccl(group: TPGroup, store: Any, device: torch.device) -> Any:
    """Connects now, and with nothing on the GPU, where a wait for a rank that ends would stay."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    store = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
    try:
        with _environment(WATCHDOG_OFF):
            nccl: Any = dist.ProcessGroupNCCL(store, group.rank, group.size, options)
        nccl.eager_connect_single_device(device)
    except RuntimeError as error:
        raise PeerLostError(f"NCCL could not connect rank {group.rank}: {error}") from error
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
