"""How prefill attention is launched: what was fastest in sweeps on an H200, as far as it fits.

It depends on sizes that the host knows, and on no length of a single sequence.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton

from nanovllm.kernels.tiles import attention_tile, shared_memory

LONG_CONTEXT = 1024  # from so many keys on, large tiles pay although they are coarse
FEW_PROGRAMS = 528  # up to so many, each runs faster with more registers and larger tiles
SPLIT_PROGRAMS = 264  # so many run at a time on an H200: two on each multiprocessor
KEYS_PER_SPLIT = 256  # with fewer, merging costs more than splitting gains
MAX_SPLITS = 32  # more were not measured
LARGE_SHARED_MEMORY = 200 * 1024  # bytes per program; Hopper and later data-center GPUs have these


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How prefill attention is launched for some sizes.

    queries: rows of a program's query tile, its tokens times the heads of a group.
    tile: keys that a program takes at a time.
    registers: the most of a thread, None for no limit. It decides how many programs share a
        multiprocessor: while one computes a softmax, others keep the tensor cores busy.
    """

    queries: int
    tile: int
    warps: int
    stages: int
    registers: int | None = None


SHORT = PrefillConfig(queries=64, tile=32, warps=4, stages=2, registers=128)
# 128 queries halve the traffic of K/V from the L2 cache, which bounds long contexts.
LONG = PrefillConfig(queries=128, tile=64, warps=8, stages=2, registers=128)
FEW = PrefillConfig(queries=64, tile=64, warps=4, stages=2)
SPLIT = PrefillConfig(queries=64, tile=64, warps=4, stages=3)
SMALL_GPU = PrefillConfig(queries=64, tile=32, warps=4, stages=3)  # 64 KiB of shared memory


def prefill_config(
    q: torch.Tensor, num_seqs: int, kv_heads: int, max_seqlen_k: int, is_paged: bool
) -> tuple[PrefillConfig, int]:
    """Returns how to launch prefill attention, and how many programs share a tile's keys.

    q: [t, heads, head_dim] of the step.
    max_seqlen_k: a bound on the keys of a sequence.
    is_paged: whether K/V are read from the cache. Only then the keys can be many more than the
        queries, so only then they are split.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv_heads
    programs = kv_heads * max_tiles(num_tokens, num_seqs, max(1, SPLIT.queries // group))
    splits = min(SPLIT_PROGRAMS // programs, max_seqlen_k // KEYS_PER_SPLIT, MAX_SPLITS)
    splits = max(splits, 1) if is_paged else 1
    if shared_memory(q.device) < LARGE_SHARED_MEMORY:
        config = SMALL_GPU
    elif splits > 1:
        config = SPLIT
    elif programs <= FEW_PROGRAMS and not is_paged:
        config = FEW
    else:
        config = LONG if max_seqlen_k >= LONG_CONTEXT else SHORT
    return _fitted(config, head_dim, q.element_size(), group), splits


def max_tiles(num_tokens: int, num_seqs: int, tokens: int) -> int:
    """Returns a bound on the number of tiles, of `tokens` tokens each, of all sequences."""
    return num_tokens // tokens + num_seqs


@functools.cache
def _fitted(config: PrefillConfig, head_dim: int, itemsize: int, group: int) -> PrefillConfig:
    padded = triton.next_power_of_2(head_dim)
    if padded > 128 or itemsize == 4:  # only small tiles fit, or there are no tensor cores
        is_wide = padded * itemsize > 512
        tile = min(64, attention_tile(padded, itemsize))
        config = PrefillConfig(32 if is_wide else 64, tile, warps=4, stages=2 if is_wide else 3)
    return replace(config, queries=max(config.queries, triton.next_power_of_2(group)))
