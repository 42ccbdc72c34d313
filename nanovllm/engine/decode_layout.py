"""How the inputs of a decode step lie in one array, without and with shared prefixes."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.batch import DecodePart
from nanovllm.engine.shared_prefix import plan_prefixes
from nanovllm.utils.context import SharedPrefixes

MAX_ITEMS = 128  # of a plan: their partial results take 32 MiB with 16 heads of 128
ALIGNMENT = 4  # int32 numbers: Triton specialises on pointers of 16 bytes


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """`size` rows, -1 for padding."""

    size: int

    @property
    def padding(self) -> np.ndarray:
        return np.full(self.size, -1)

    def holds(self, part: DecodePart) -> bool:
        return len(part.rows) <= self.size

    def pack(self, part: DecodePart) -> np.ndarray:
        return np.array(part.rows + [-1] * (self.size - len(part.rows)))


@dataclass(frozen=True, slots=True)
class PrefixDecodeLayout:
    """The places of rows, and of the plan that reads their prefixes once, in one int64 array.

    num_rows: rows, padding included.
    num_heads, num_kv_heads: of this rank's attention.
    block_size: tokens of a K/V block.
    """

    num_rows: int
    num_heads: int
    num_kv_heads: int
    block_size: int

    @property
    def size(self) -> int:
        """The number of elements of the packed array."""
        return sum(self._sizes)

    @property
    def padding(self) -> np.ndarray:
        """A packed array without any row."""
        padding = np.zeros(self.size, dtype=np.int64)
        padding[: self.num_rows] = -1
        return padding

    def holds(self, part: DecodePart) -> bool:
        return len(part.rows) <= self.num_rows

    def pack(self, part: DecodePart) -> np.ndarray:
        """Returns rows and plan of a batch of at most `num_rows` rows, int64 [size]."""
        from nanovllm.kernels.shared_prefix import enough_items, members_per_item

        enough = min(enough_items(self.num_kv_heads), MAX_ITEMS)
        per_item = members_per_item(self.num_heads // self.num_kv_heads)
        groups, block_size = part.prefix_groups, self.block_size
        plan = plan_prefixes(groups, self.num_rows, block_size, per_item, MAX_ITEMS, enough)
        packed, offset = self.padding, 0
        for numbers, size in zip(
            (np.array(part.rows), plan.rows.ravel(), plan.members, plan.items.ravel()),
            self._sizes,
            strict=True,
        ):
            packed[offset : offset + len(numbers)] = numbers
            offset += size
        return packed

    def unpack(self, packed: Tensor) -> tuple[Tensor, SharedPrefixes]:
        """packed: int64 [size] -> rows int64 [num_rows], plan."""
        _, prefix_rows, members, items = packed.to(torch.int32).split(self._sizes)
        prefixes = SharedPrefixes(
            items=items.view(MAX_ITEMS, 5),
            members=members[: self.num_rows],
            rows=prefix_rows[: 3 * self.num_rows].view(-1, 3),
        )
        return packed[: self.num_rows], prefixes

    @property
    def _sizes(self) -> list[int]:
        n = self.num_rows
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in (n, 3 * n, n, 5 * MAX_ITEMS)]


def prefix_graph_sizes(decode_sizes: list[int]) -> list[int]:
    """Returns the batch sizes that have graphs for shared prefixes: fewer than `decode_sizes`, as
    padding costs little there, but the largest of them."""
    largest = decode_sizes[-1]
    return [n for n in decode_sizes if n in (8, 16, largest) or n % 32 == 0]
