"""The ranks that share a model's layers. Layers get a `TPGroup` and never ask a global."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TPGroup:
    """This rank's place among `size` tensor-parallel ranks, and their collectives."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        """This rank's share of `total`, which must divide evenly; `what` names it in the error."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks, in place. With one rank no process group is needed."""
        if self.size > 1:
            dist.all_reduce(x)
        return x
