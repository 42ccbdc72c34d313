"""Tests how large the K/V pool becomes: by the engine's own share of a GPU, and alike on all
ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import kv_cache
from nanovllm.engine.kv_cache import CPU_MEMORY_SHARE, GIB, LEFT_FREE, KVCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.host_memory import HostMemory

MIB = 2**20
TOTAL = 100 * GIB  # of the simulated GPU
WORKING = 3 * GIB  # what its steps need
SIZES = {"max_model_len": 64, "kvcache_block_size": 16, "max_num_seqs": 10_000}


@pytest.fixture
def make_cache(tiny_qwen3: Path) -> Callable[..., KVCache]:
    """Returns a function that makes the K/V cache of one rank, with blocks of 256 KiB."""

    def make(group: TPGroup, **knobs: float) -> KVCache:
        config = Config(str(tiny_qwen3), device="cpu", **(SIZES | knobs))  # type: ignore[arg-type]
        layers = [Attention(num_heads=8, num_kv_heads=8, head_dim=64) for _ in range(4)]
        cache = KVCache(config, layers, TorchBackend(), group)
        assert cache.block_bytes == MIB // 4
        return cache

    return make


@pytest.fixture
def blocks_on_gpu(
    make_cache: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Returns a function that sizes a pool on a simulated GPU and returns its number of blocks.

    at_start, now: free bytes before the engine took any, and when the pool is sized.
    """

    def blocks(at_start: int, now: int, **knobs: float) -> int:
        cache = make_cache(TPGroup(), **knobs)
        cache._config.torch_device = torch.device("cuda", 0)
        allocated: list[int] = []
        monkeypatch.setattr(cache, "allocate", allocated.append)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (now, TOTAL))
        cache.allocate_on_gpu(at_start, WORKING)
        return allocated[0]

    return blocks


def test_ranks_with_unequal_memory_have_pools_of_one_size(
    make_cache: Callable[..., KVCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block ids are rank 0's, so a smaller pool on another rank would be written out of bounds."""
    own = local()
    monkeypatch.setattr(kv_cache, "host_memory", lambda: HostMemory(own.available, own.available))

    def num_blocks(rank: int) -> int:
        own.available = int([60, 40, 80][rank] * MIB / CPU_MEMORY_SHARE)
        cache = make_cache(TPGroup.connect(rank, 3, str(tmp_path / "store")))
        cache.allocate_on_cpu()
        assert len(cache._pool[0, 0]) == cache.num_blocks
        return cache.num_blocks

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(num_blocks, range(3))) == [4 * 40 // 3] * 3


def test_the_share_is_the_engines_own(blocks_on_gpu: Callable[..., int]) -> None:
    """What other processes hold does not count against it; what the engine itself holds does."""
    expected = 4 * (40 * GIB - 10 * GIB - WORKING) // MIB
    for others in (0, 50 * GIB):
        free = TOTAL - others
        num = blocks_on_gpu(free, free - 10 * GIB, gpu_memory_utilization=0.4)
        assert num == expected


def test_a_share_of_which_others_hold_a_part_is_what_is_free(
    blocks_on_gpu: Callable[..., int],
) -> None:
    num = blocks_on_gpu(30 * GIB, 20 * GIB, gpu_memory_utilization=0.9)
    assert num == 4 * (20 * GIB - LEFT_FREE - WORKING) // MIB


@pytest.mark.parametrize(("used", "utilization"), [(55 * GIB, 0.1), (3 * GIB, 0.06)])
def test_a_share_without_room_for_a_pool_names_numbers_and_knobs(
    used: int, utilization: float, blocks_on_gpu: Callable[..., int]
) -> None:
    """In the first case less than nothing is left, in the second nothing."""
    pattern = (
        r"pool of 0 blocks .*max_model_len=64 tokens, which takes 4 blocks.* 0\.00 GiB are left of "
        rf"gpu_memory_utilization={utilization} .*raise it, or lower max_model_len, max_num_b"
    )
    with pytest.raises(ValueError, match=pattern):
        blocks_on_gpu(90 * GIB, 90 * GIB - used, gpu_memory_utilization=utilization)


def test_as_many_blocks_as_asked_for_or_none(blocks_on_gpu: Callable[..., int]) -> None:
    """The share bounds only a pool that is measured."""
    free, affordable = 50 * GIB, 4 * (50 * GIB - LEFT_FREE - WORKING) // MIB
    knobs = {"gpu_memory_utilization": 0.01}
    assert blocks_on_gpu(free, free, **knobs, num_kvcache_blocks=affordable) == affordable
    with pytest.raises(ValueError, match=rf"num_kvcache_blocks={affordable + 1}.*{affordable}$"):
        blocks_on_gpu(free, free, **knobs, num_kvcache_blocks=affordable + 1)
