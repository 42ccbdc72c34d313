"""How decode attention is launched: what was fastest in sweeps on an H200, as far as it fits.

It depends on sizes alone, so that a captured launch stays right: a context that is too short for
its splits leaves the later ones empty.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels.merge_splits import padded_splits
from nanovllm.kernels.tiles import attention_tile, shared_memory


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
    def compiled_as(self) -> tuple[int, int, int, int]:
        """What the compiled code depends on."""
        splits = padded_splits(self.splits) if self.splits > 1 else 1
        return splits, self.kib, self.stages, self.warps

    def fitted(
        self, num_queries: int, head_dim: int, q: torch.Tensor, kv_itemsize: int
    ) -> tuple[int, int, int]:
        """Returns tokens per tile, stages and warps that fit this GPU.

        num_queries, head_dim: a program's query heads and their size, both padded.
        q: gives dtype and device. kv_itemsize: bytes of an element of K or V.
        """
        stages = self.stages
        tile = attention_tile(head_dim, kv_itemsize, self.kib * 1024)
        if 2 * (stages - 1) * tile * head_dim * kv_itemsize > shared_memory(q.device) // 2:
            stages = 2
        if q.element_size() == 4:
            return tile, stages, 4  # products without tensor cores
        return tile, stages, max(self.warps, min(8, num_queries * head_dim // 2048))  # registers


# By the least number of sequences times K/V heads. A multiprocessor holds few programs with big
# tiles and more with small ones; what pays is that the last ones to start find most multiprocessors
# busy, for which few K/V heads and long contexts need many splits, and ragged contexts some:
# docs/benchmarks/2026-12-01-decode-launches.md.
CONFIGS = (
    (920, DecodeConfig(1, 16, stages=3, warps=4)),
    (352, DecodeConfig(4, 8, stages=3, warps=2)),
    (200, DecodeConfig(4, 4, stages=3, warps=1)),
    (144, DecodeConfig(6, 4, stages=3, warps=1)),
    (80, DecodeConfig(8, 4, stages=3, warps=1)),
    (32, DecodeConfig(16, 4, stages=3, warps=1)),
    (16, DecodeConfig(32, 4, stages=3, warps=1)),
    (5, DecodeConfig(32, 8, stages=3, warps=2)),
    (2, DecodeConfig(32, 16, stages=3, warps=4)),
    (1, DecodeConfig(64, 16, stages=3, warps=4)),
)
# The same for K and V in 8 bits, whose arithmetic takes as long as their reads: small tiles, whose
# programs take few registers, were fastest throughout (docs/fp8_kv_cache.md).
CONFIGS_OF_BYTES = (
    (920, DecodeConfig(1, 4, stages=3, warps=1)),
    (352, DecodeConfig(4, 4, stages=3, warps=1)),
    (200, DecodeConfig(6, 4, stages=3, warps=1)),
    (80, DecodeConfig(8, 4, stages=3, warps=1)),
    (16, DecodeConfig(32, 4, stages=3, warps=1)),
    (1, DecodeConfig(32, 8, stages=2, warps=2)),
)
# Where contexts need no splits, and are short without the prefixes that they share. With K and V in
# 8 bits the launch without prefixes is as small already.
AFTER_PREFIXES = DecodeConfig(1, 8, stages=3, warps=1)


def decode_config(
    num_programs: int, has_prefixes: bool = False, kv_itemsize: int = 2
) -> DecodeConfig:
    """Returns how to launch a batch.

    num_programs: its sequences times K/V heads.
    has_prefixes: whether keys that its sequences share are attended to apart.
    kv_itemsize: bytes of an element of K or V.
    """
    configs = CONFIGS_OF_BYTES if kv_itemsize == 1 else CONFIGS
    config = next(config for least, config in configs if num_programs >= least)
    is_after_prefixes = has_prefixes and config.splits == 1 and kv_itemsize > 1
    return AFTER_PREFIXES if is_after_prefixes else config
