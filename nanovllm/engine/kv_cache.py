"""The K/V pool of one rank: what a block takes, how many blocks there are, and their memory."""

import logging
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.batch import BlockCopy
from nanovllm.layers.attention import Attention, AttentionBackend, LayerCache
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.host_memory import host_memory

logger = logging.getLogger("nanovllm")

CPU_MEMORY_SHARE = 0.25  # of what is available
GIB = 2**30
LEFT_FREE = GIB // 4  # on a GPU that others fill: the driver takes some in pieces of its own


class KVCache:
    """Owns the pool and binds each attention layer to its part of it.

    One pool holds the K and V of all layers, [2, layers, num_blocks, block_size, kv_heads,
    head_dim], in the model's dtype, or in 8 bits with `kv_cache_dtype="fp8"`. Then another one
    holds their scales, bf16 [layers, num_blocks, kv_heads, block_size, 2].
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[Attention],
        backend: AttentionBackend,
        group: TPGroup,
    ) -> None:
        self.num_blocks = 0
        self._pool = torch.empty(0)
        self._scales: torch.Tensor | None = None
        self._config = config
        self._layers = layers
        self._backend = backend
        self._group = group

    @property
    def block_bytes(self) -> int:
        """The bytes of one block: K and V of all layers, and their scales if they have some."""
        return block_bytes(self._config, self._layers)

    def allocate(self, num_blocks: int) -> None:
        """Replaces the pool by one of `num_blocks` zeroed blocks, and binds the layers to it."""
        config, num_layers = self._config, len(self._layers)
        self._pool, self._scales = torch.empty(0), None
        for layer in self._layers:  # frees the previous pool first
            layer.bind(self._backend, LayerCache(torch.empty(0), torch.empty(0)))
        self._pool = _zeros(self._shape(num_blocks), config.kv_torch_dtype, config.torch_device)
        scales: Iterable[torch.Tensor | None] = [None] * num_layers
        if config.is_kv_quantised:
            shape = self._scales_shape(num_blocks)
            self._scales = scales = _zeros(shape, torch.bfloat16, config.torch_device)
        for layer, *cache in zip(self._layers, *self._pool, scales, strict=True):
            layer.bind(self._backend, LayerCache(*cache))
        self.num_blocks = num_blocks

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copies leading tokens of blocks to other blocks, in all layers."""
        for block in copies:  # one kernel each, without memory in between
            tokens = slice(block.num_tokens)
            self._pool[:, :, block.target, tokens] = self._pool[:, :, block.source, tokens]
            if self._scales is not None:
                kept = self._scales[:, block.source, :, tokens]
                self._scales[:, block.target, :, tokens] = kept

    def allocate_on_cpu(self) -> None:
        """Sizes the pool by the host's memory, which all ranks share, and allocates it."""
        pool_bytes = int(host_memory().available * CPU_MEMORY_SHARE) // self._group.size
        self._allocate_within(pool_bytes)

    def allocate_on_gpu(self, free_at_start: int, working_bytes: int) -> None:
        """Sizes the pool by what the engine's share of the GPU leaves, and allocates it.

        free_at_start: free memory before the engine took any, so that what others use does not
            count.
        working_bytes: what steps and graphs will need beyond what is in use now.
        """
        free, total = torch.cuda.mem_get_info(self._config.torch_device)
        used = free_at_start - free
        pool_bytes = free - LEFT_FREE
        if self._config.num_kvcache_blocks == -1:
            share = int(total * self._config.gpu_memory_utilization)
            pool_bytes = min(pool_bytes, share - used)
            logger.debug(
                "GPU share %.2f GiB of %.2f: %.2f in use, %.2f for steps and graphs",
                share / GIB,
                total / GIB,
                used / GIB,
                working_bytes / GIB,
            )
        self._allocate_within(pool_bytes - working_bytes)

    def _allocate_within(self, pool_bytes: int) -> None:
        """Allocates a pool that fits the smallest `pool_bytes` of all ranks."""
        pool_bytes = self._group.min(pool_bytes)
        self.allocate(resolve_num_blocks(self._config, self.block_bytes, pool_bytes))

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        layer = self._layers[0]
        block = (self._config.kvcache_block_size, layer.num_kv_heads, layer.head_dim)
        return 2, len(self._layers), num_blocks, *block

    def _scales_shape(self, num_blocks: int) -> tuple[int, ...]:
        heads, block_size = self._layers[0].num_kv_heads, self._config.kvcache_block_size
        return len(self._layers), num_blocks, heads, block_size, 2


def block_bytes(config: Config, layers: Sequence[Attention]) -> int:
    """Returns the bytes of one rank's block: K and V of all layers, and their scales if they have
    some."""
    layer = layers[0]
    vector_bytes = layer.head_dim * config.kv_torch_dtype.itemsize
    if config.is_kv_quantised:
        vector_bytes += torch.bfloat16.itemsize
    token_bytes = 2 * layer.num_kv_heads * vector_bytes
    return len(layers) * config.kvcache_block_size * token_bytes


def resolve_num_blocks(config: Config, block_bytes: int, pool_bytes: int) -> int:
    """Returns the number of blocks: as configured, else as many as `pool_bytes` holds.

    Raises `ValueError` if the pool cannot hold one request of `max_model_len` tokens, or if what is
    configured does not fit.
    """
    need, affordable = config.max_blocks_per_seq, pool_bytes // block_bytes
    if config.num_kvcache_blocks != -1:
        num_blocks = config.num_kvcache_blocks
        if num_blocks > affordable and config.torch_device.type == "cuda":
            raise ValueError(
                f"num_kvcache_blocks={num_blocks} takes {num_blocks * block_bytes / GIB:.2f} GiB, "
                f"but {pool_bytes / GIB:.2f} GiB are free for it: at most {affordable}"
            )
    elif config.torch_device.type == "cuda":
        num_blocks = affordable
    else:
        num_blocks = max(min(config.max_num_seqs * need, affordable), need)
    if num_blocks < need:
        raise ValueError(_pool_too_small(config, max(num_blocks, 0), block_bytes, pool_bytes))
    logger.debug(
        "K/V pool: %d blocks of %d tokens, %.2f GiB",
        num_blocks,
        config.kvcache_block_size,
        num_blocks * block_bytes / GIB,
    )
    return num_blocks


def _pool_too_small(config: Config, num_blocks: int, block_bytes: int, pool_bytes: int) -> str:
    size, need = config.kvcache_block_size, config.max_blocks_per_seq
    return (
        f"the K/V pool of {num_blocks} blocks x {size} tokens cannot hold one request of "
        f"max_model_len={config.max_model_len} tokens, which takes {need} blocks; "
        f"they are {need * block_bytes / GIB:.2f} GiB, {max(pool_bytes, 0) / GIB:.2f} GiB are left "
        f"of gpu_memory_utilization={config.gpu_memory_utilization} after weights and working "
        "memory; raise it, or lower max_model_len, max_num_batched_tokens or max_num_seqs"
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros, not empty memory: what attention masks out must still be finite.

    On the CPU, memory is mapped when it is first touched, which `torch.zeros` would not do.
    """
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
