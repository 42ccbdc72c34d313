"""How decode attention is launched: what was fastest in sweeps on an H200, as far as it fits.

Depends on sizes only, so that a captured launch stays right; short contexts leave their later
splits empty.
"""

from dataclasses import dataclass

import torch
import triton

from nanovllm.kernels.tiles import attention_tile, shared_memory

SPLIT_PROGRAMS = 900  # keep the memory of a large GPU busy with splits of few sequences
MERGED_PROGRAMS = 512  # do so with more than 8 splits, whose merge takes longer
SMALL_TILE_PROGRAMS = 512  # splits that keep it as busy with little on its way to each
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Launch:
    """Splits of each context, KiB per tile of K or V, and Triton's options."""

    splits: int
    kib: int
    stages: int
    warps: int

    @property
    def kernel(self) -> tuple[bool, int, int, int]:
        """What is compiled for it: the same for any number of splits from two on."""
        return self.splits > 1, self.kib, self.stages, self.warps

    def fitted(self, num_rows: int, row_size: int, q: torch.Tensor) -> tuple[int, int, int]:
        """Tokens per tile, stages and warps.

        num_rows, row_size: of a program's query heads, padded; row_size values make a token's K or
        V. q: for its dtype and device.
        """
        itemsize, stages = q.element_size(), self.stages
        tile = attention_tile(row_size, itemsize, self.kib * 1024)
        if 2 * (stages - 1) * tile * row_size * itemsize > shared_memory(q.device) // 2:
            stages = 2
        if itemsize == 4:
            return tile, stages, 4  # products without tensor cores
        return tile, stages, max(self.warps, min(8, num_rows * row_size // 2048))  # registers


# By the least number of sequences times K/V heads, where that is enough for whole contexts, halves
# or thirds of them. A multiprocessor holds few programs of big tiles and more of small ones; what
# pays is that the last ones to start find most multiprocessors busy. Swept over bench.py's
# contexts, the longest first; thirds also in random order.
LAUNCHES = (
    (2040, Launch(1, 8, stages=3, warps=1)),
    (1760, Launch(1, 16, stages=2, warps=4)),
    (1152, Launch(1, 8, stages=3, warps=1)),
    (800, Launch(1, 8, stages=4, warps=1)),
    (520, Launch(1, 16, stages=3, warps=4)),
    (424, Launch(2, 16, stages=2, warps=4)),
    (376, Launch(1, 16, stages=3, warps=4)),
    (296, Launch(3, 4, stages=3, warps=1)),
)


def launch_for(num_programs: int) -> Launch:
    """For so many sequences times K/V heads."""
    for least, launch in LAUNCHES:
        if num_programs >= least:
            return launch
    wanted = triton.next_power_of_2(triton.cdiv(SPLIT_PROGRAMS, num_programs))
    splits = min(wanted, max(8, MERGED_PROGRAMS // num_programs), MAX_SPLITS)
    if num_programs * splits >= SMALL_TILE_PROGRAMS:
        return Launch(splits, 4, stages=3, warps=1)
    return Launch(splits, 8, stages=3, warps=2)
