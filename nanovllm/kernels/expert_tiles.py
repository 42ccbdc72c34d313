"""The tiles of the matmuls of a mixture of experts, and which of them suit a batch."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from nanovllm.kernels.tiles import shared_memory, tile_descriptor


@dataclass(frozen=True, slots=True)
class Tile:
    """The sizes of a tile in tokens (m), output features (n; as many gates as ups) and input
    features (k).

    stages: tiles on their way at a time.
    has_descriptor: whether the weight is read through the GPU's copy engine, if there is one. It
        pays where the arithmetic is the limit.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    weight_is_wide: bool = False
    has_descriptor: bool = False

    def stages_that_fit(self, x: torch.Tensor, num_weights: int) -> int:
        """Returns how many of the stages fit into the shared memory of this GPU, at least 1."""
        stage_bytes = (self.block_m + num_weights * self.block_n) * self.block_k * x.element_size()
        return max(min(self.stages, shared_memory(x.device) // stage_bytes), 1)

    def grid(self, n: int, num_tiles: int) -> tuple[int]:
        """Returns the number of programs for `n` output features, those of a tile in sequence."""
        return (triton.cdiv(n, self.block_n) * num_tiles,)

    def meta(self, x: torch.Tensor, weight: object, n: int, num_weights: int) -> dict[str, Any]:
        """Returns the compile-time arguments of both kernels, for `n` output features of each of
        `num_weights` weights."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "WEIGHT_IS_WIDE": self.weight_is_wide,
            "HAS_DESCRIPTOR": not isinstance(weight, torch.Tensor),
            "DIVIDES": n % self.block_n == 0 and x.shape[1] % self.block_k == 0,
            "num_warps": self.warps,
            "num_stages": self.stages_that_fit(x, num_weights),
        }

    def weight_argument(self, weight: torch.Tensor) -> Any:
        """Returns the weight [num_experts, rows, size], or a descriptor of its rows."""
        if not self.has_descriptor:
            return weight
        return tile_descriptor(weight.flatten(0, 1), (self.block_n, self.block_k)) or weight


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of both matmuls for up to `most` assignments per expert on average.

    They have the same number of tokens, and so the same routing.
    """

    most: float
    gate_up: Tile
    down: Tile


# What is fastest on an H200 for 128 experts of 2048 x 768. Where reading the weights is the limit,
# a tile has about twice the tokens of an average expert: few experts have a second one, which reads
# them again.
HALF_PRECISION = (
    Tiles(
        10,
        Tile(16, 64, 128, stages=3, warps=4, weight_is_wide=True),
        Tile(16, 128, 128, stages=3, warps=4, weight_is_wide=True),
    ),
    Tiles(
        26,
        Tile(32, 64, 64, stages=5, warps=4, weight_is_wide=True),
        Tile(32, 128, 64, stages=5, warps=4, weight_is_wide=True),
    ),
    Tiles(
        56,
        Tile(64, 64, 64, stages=3, warps=4, weight_is_wide=True),
        Tile(64, 128, 64, stages=4, warps=4, weight_is_wide=True),
    ),
    Tiles(
        float("inf"),
        Tile(128, 128, 64, stages=4, warps=8, has_descriptor=True),
        Tile(128, 256, 64, stages=4, warps=8, has_descriptor=True),
    ),
)
SINGLE_PRECISION = (
    Tiles(
        float("inf"),
        Tile(16, 32, 32, stages=2, warps=4),
        Tile(16, 32, 32, stages=2, warps=4),
    ),
)


def tiles_table(dtype: torch.dtype) -> tuple[Tiles, ...]:
    """Returns the tiles for a dtype of the weights, ascending in `most`."""
    return HALF_PRECISION if dtype.itemsize == 2 else SINGLE_PRECISION


def tiles_for(mean: float, dtype: torch.dtype) -> Tiles:
    """Returns the tiles for `mean` assignments per expert on average."""
    return next(tiles for tiles in tiles_table(dtype) if mean <= tiles.most)
