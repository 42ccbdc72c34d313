"""How many K/V blocks an engine gets."""

import logging

import psutil

from nanovllm.config import Config

logger = logging.getLogger(__name__)

CPU_MEMORY_SHARE = 0.25  # of what is available


def resolve_num_blocks(config: Config, block_bytes: int) -> int:
    """Blocks in the pool: as configured, else enough for every resident within the memory share.

    block_bytes: K and V of one block over all layers. `ValueError` if the configured pool cannot
    hold one request of `max_model_len` tokens.
    """
    need = -(-config.max_model_len // config.kvcache_block_size)  # blocks for one request
    if config.num_kvcache_blocks != -1:
        check_pool(config, config.num_kvcache_blocks, need)
        return config.num_kvcache_blocks
    available = psutil.virtual_memory().available
    affordable = int(available * CPU_MEMORY_SHARE) // block_bytes
    num_blocks = max(min(config.max_num_seqs * need, affordable), need)
    logger.info(
        "K/V pool: %d blocks of %d tokens, %.2f GiB",
        num_blocks,
        config.kvcache_block_size,
        num_blocks * block_bytes / 2**30,
    )
    return num_blocks


def check_pool(config: Config, num_blocks: int, need: int) -> None:
    if num_blocks < need:
        raise ValueError(
            f"the K/V pool of {num_blocks} blocks x {config.kvcache_block_size} tokens cannot hold "
            f"one request of max_model_len={config.max_model_len} tokens, which takes {need} "
            f"blocks; raise num_kvcache_blocks to {need} or lower max_model_len to "
            f"{num_blocks * config.kvcache_block_size}"
        )
