"""How decode attention is launched: what was fastest in sweeps on an H200, as far as it fits.

It depends on sizes alone, so that a captured launch stays right: a context that is too short for
its splits leaves the later ones empty.
"""

from dataclasses import dataclass

import torch
import triton

from nanovllm.kernels.merge_splits import MAX_SPLITS
from nanovllm.kernels.tiles import attention_tile, shared_memory

SPLIT_PROGRAMS = 900  # so many keep the memory of a large GPU busy
MERGED_PROGRAMS = 512  # so many suffice with more than 8 splits, whose merge takes longer
SMALL_TILE_PROGRAMS = 512  # so many keep it busy with small tiles too


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention is launched for some batch sizes.

    splits: programs that share the context of a sequence.
    kib: size of a tile of K or V.
    """

    splits: int
    kib: int
    stages: int
    warps: int

    @property
    def compiled_as(self) -> tuple[bool, int, int, int]:
        """What the compiled code depends on: any number of splits from two on is the same."""
        return self.splits > 1, self.kib, self.stages, self.warps

    def fitted(self, num_queries: int, head_dim: int, q: torch.Tensor) -> tuple[int, int, int]:
        """Returns tokens per tile, stages and warps that fit this GPU.

        num_queries, head_dim: a program's query heads and their size, both padded.
        q: gives dtype and device.
        """
        itemsize, stages = q.element_size(), self.stages
        tile = attention_tile(head_dim, itemsize, self.kib * 1024)
        if 2 * (stages - 1) * tile * head_dim * itemsize > shared_memory(q.device) // 2:
            stages = 2
        if itemsize == 4:
            return tile, stages, 4  # products without tensor cores
        return tile, stages, max(self.warps, min(8, num_queries * head_dim // 2048))  # registers


# By the least number of sequences times K/V heads: from so many on the contexts need no splits. A
# multiprocessor holds few programs with big tiles and more with small ones; what pays is that the
# last ones to start find most multiprocessors busy. From replays of bench.py's decode steps:
# docs/benchmarks/2026-12-01-ablation.md.
CONFIGS = (
    (920, DecodeConfig(1, 8, stages=3, warps=1)),
    (376, DecodeConfig(1, 16, stages=3, warps=4)),
)


def decode_config(num_programs: int) -> DecodeConfig:
    """num_programs: sequences times K/V heads of a batch -> how to launch it."""
    for least, config in CONFIGS:
        if num_programs >= least:
            return config
    wanted = triton.next_power_of_2(triton.cdiv(SPLIT_PROGRAMS, num_programs))
    splits = min(wanted, max(8, MERGED_PROGRAMS // num_programs), MAX_SPLITS)
    if num_programs * splits >= SMALL_TILE_PROGRAMS:
        return DecodeConfig(splits, 4, stages=3, warps=1)
    return DecodeConfig(splits, 8, stages=3, warps=2)
