"""How many K/V blocks an engine gets, and their memory."""

import logging
import math

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.utils.host_memory import host_memory

logger = logging.getLogger(__name__)

CPU_MEMORY_SHARE = 0.25  # of what is available
GIB = 2**30
LEFT_FREE = GIB // 4  # on a GPU that others fill: the driver takes some in pieces of its own


def resolve_num_blocks(config: Config, block_bytes: int, pool_bytes: int) -> int:
    """Blocks in the pool: as configured, else as many as `pool_bytes` holds.

    block_bytes: K and V of one block over all layers. `ValueError` if the pool cannot hold one
    request of `max_model_len` tokens, or what is configured does not fit.
    """
    need = -(-config.max_model_len // config.kvcache_block_size)  # blocks for one request
    affordable = pool_bytes // block_bytes
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
        raise ValueError(_pool_too_small(config, max(num_blocks, 0), need, block_bytes, pool_bytes))
    logger.info(
        "K/V pool: %d blocks of %d tokens, %.2f GiB",
        num_blocks,
        config.kvcache_block_size,
        num_blocks * block_bytes / GIB,
    )
    return num_blocks


def _pool_too_small(
    config: Config, num_blocks: int, need: int, block_bytes: int, pool_bytes: int
) -> str:
    size = config.kvcache_block_size
    message = (
        f"the K/V pool of {num_blocks} blocks x {size} tokens cannot hold one request of "
        f"max_model_len={config.max_model_len} tokens, which takes {need} blocks; "
    )
    if config.num_kvcache_blocks != -1:
        return message + (
            f"raise num_kvcache_blocks to {need} or lower max_model_len to {num_blocks * size}"
        )
    return message + (
        f"they are {need * block_bytes / GIB:.2f} GiB, {max(pool_bytes, 0) / GIB:.2f} GiB are left "
        f"of gpu_memory_utilization={config.gpu_memory_utilization} after weights and working "
        "memory; raise it, or lower max_model_len, max_num_batched_tokens or max_num_seqs"
    )


def cpu_pool_bytes() -> int:
    return int(host_memory().available * CPU_MEMORY_SHARE)


def cuda_pool_bytes(config: Config, free_at_start: int, working_bytes: int) -> int:
    """What this engine's share of the GPU leaves for the pool (negative if nothing).

    free_at_start: free memory before the engine took any, so that what others use does not count.
    working_bytes: what steps and graphs will need beyond what is in use now.
    """
    free, total = torch.cuda.mem_get_info(config.torch_device)
    used = free_at_start - free
    free -= LEFT_FREE
    if config.num_kvcache_blocks != -1:
        return free - working_bytes
    share = int(total * config.gpu_memory_utilization)
    logger.info(
        "GPU share %.2f GiB of %.2f: %.2f in use, %.2f for steps and graphs",
        share / GIB,
        total / GIB,
        used / GIB,
        working_bytes / GIB,
    )
    return min(share - used, free) - working_bytes


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: what attention masks out must still be finite. On the CPU memory is mapped
    when it is first touched, as torch.zeros would not do."""
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
