"""The ranks that share a model's layers. Layers are given a `TPGroup` and never ask a global.

This module makes process-group objects of its own and leaves torch.distributed's default group to
the user. Gloo connects the hosts, for values that only they need; `GPULinks` connects the GPUs.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.utils.gpu_links import TIMEOUT, GPULinks, PeerLostError
from nanovllm.utils.peer_memory import PeerMemory

WAIT_SLICE = timedelta(seconds=0.2)
CPU = torch.device("cpu")


def has_gloo() -> bool:
    """Returns whether this build of torch can connect several ranks."""
    return dist.is_available() and dist.is_gloo_available()


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
        exchange_shape: tuple[int, int] = (0, 0),
    ) -> "TPGroup":
        """Connects this rank with the others and returns the group.

        store_file: through which the ranks find each other; not needed after this call.
        exchange_shape: rows of peer memory, and bytes of a row, that frequent messages need.

        Raises `PeerLostError` if the ranks do not meet in time.
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
        group.min(rank)  # a barrier: all have met
        if device.type == "cuda":
            links = GPULinks(rank, size, store, device, exchange_shape, group.all_gather)
            group = cls(rank, size, group.process_group, links)
        return group

    @property
    def peers(self) -> PeerMemory | None:
        """The memory for one-shot exchanges between GPUs, None without any."""
        return None if self.links is None else self.links.peers

    def peers_for_sum(self, num_tokens: int, token_bytes: int) -> PeerMemory | None:
        """Returns the memory through which a norm should sum hidden states over the ranks, or None.

        token_bytes: the size of one token's hidden state.
        """
        peers = self.peers
        return peers if peers is not None and peers.suits_sum(num_tokens, token_bytes) else None

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory that the links between the ranks take."""
        return 0 if self.links is None else self.links.num_bytes

    def check(self) -> None:
        """Raises `PeerLostError` after an abort, when the GPUs no longer wait for each other."""
        if self.links is not None and self.links.is_aborted:
            raise self._peer_lost()

    def share(self, total: int, what: str) -> int:
        """Returns `total` divided by the number of ranks.

        Raises `ValueError`, in which `what` names the value, if it does not divide evenly.
        """
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks in place and returns it."""
        if self.size == 1 or x.numel() == 0:
            return x
        if x.is_cuda and self.links is not None:
            self.links.all_reduce(x)
        else:
            self._wait(self.process_group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers `x`, [...], from every rank -> [size, ...]."""
        out = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            out[0] = x
        elif x.is_cuda and self.links is not None:
            self.links.all_gather(out, x)
        else:
            self._wait(self.process_group.allgather([list(out.unbind())], [x]))
        return out

    def min(self, value: int) -> int:
        """Returns the smallest of the ranks' values. No rank returns before all have called."""
        return int(self.all_gather(torch.tensor(value, device="cpu")).min())

    def _wait(self, work: Any) -> None:
        """Waits for a collective, in slices, because Python handles signals only between them.

        Raises `PeerLostError` if the collective fails.
        """
        while not work.is_completed():
            with suppress(RuntimeError):  # the slice is over, or the work has failed
                work.wait(WAIT_SLICE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._peer_lost() from error

    def _peer_lost(self) -> PeerLostError:
        return PeerLostError(
            f"rank {self.rank} of {self.size} has lost another: it ended, or hangs"
        )
