"""The ranks that share a model's layers. Layers get a `TPGroup` and never ask a global.

The only user of torch.distributed, and of its process-group objects alone: the default group of the
process is the user's.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)  # of one collective; a peer's death is noticed at once


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
        """Meets the other ranks through a file of their own; all must be about to call this."""
        store = dist.FileStore(store_file, size)  # type: ignore[attr-defined]
        store.set_timeout(TIMEOUT)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return cls(rank, size, dist.ProcessGroupGloo(store, rank, size, options))

    def share(self, total: int, what: str) -> int:
        """This rank's share of `total`, which must divide evenly; `what` names it in the error."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks, in place."""
        if self.size > 1:
            self.process_group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of each rank -> [size, ...]"""
        out = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            out[0] = x
        else:
            self.process_group.allgather([list(out.unbind())], [x]).wait()
        return out

    def min(self, value: int) -> int:
        """The smallest of the ranks' values; no rank returns before all have called."""
        return int(self.all_gather(torch.tensor(value)).min())
