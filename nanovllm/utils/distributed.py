"""The ranks that share a model's layers. Layers get a `TPGroup` and never ask a global.

The only user of torch.distributed, and of its process-group objects alone: the default group of the
process is the user's.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)  # for ranks that differ in speed; a peer's end is noticed at once
PIECE = timedelta(seconds=0.2)


class PeerLostError(RuntimeError):
    """A collective failed: another rank has ended, or hangs."""


@dataclass(frozen=True, slots=True)
class TPGroup:
    """This rank's place among `size` tensor-parallel ranks, and their collectives.

    With one rank there is no process group, and every collective is the identity.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None

    @classmethod
    def connect(cls, rank: int, size: int, store_file: str) -> "TPGroup":
        """Meets the other ranks through a file of their own, which none needs afterwards."""
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
        return group

    def share(self, total: int, what: str) -> int:
        """This rank's share of `total`, which must divide evenly; `what` names it in the error."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks, in place."""
        if self.size > 1:
            self._complete(self.process_group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of each rank -> [size, ...]"""
        out = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            out[0] = x
        else:
            self._complete(self.process_group.allgather([list(out.unbind())], [x]))
        return out

    def min(self, value: int) -> int:
        """The smallest of the ranks' values; no rank returns before all have called."""
        return int(self.all_gather(torch.tensor(value)).min())

    def _complete(self, work: Any) -> None:
        """Waits, in pieces: Python serves signals only between them."""
        while not work.is_completed():
            with suppress(RuntimeError):  # the piece is over, or the work has failed
                work.wait(PIECE)
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} of {self.size} has lost another: it ended, or hangs"
            ) from error
