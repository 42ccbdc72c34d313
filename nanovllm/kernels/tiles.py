"""What fits into a multiprocessor's shared memory: how much it has, and attention's tiles."""

import functools

import torch
import triton


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use; a Hopper's under the interpreter, which has no limit."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    if hasattr(properties, "shared_memory_per_block_optin"):  # torch 2.7 and later
        return int(properties.shared_memory_per_block_optin)
    utils = triton.runtime.driver.active.utils
    return int(utils.get_device_properties(device.index)["max_shared_mem"])


def attention_tile(padded_head_dim: int, itemsize: int, device: torch.device) -> int:
    """Tokens per K/V tile of decode attention: two stages of K and V tiles must fit."""
    tile_bytes = 32 * 1024 if shared_memory(device) >= 160 * 1024 else 16 * 1024
    return max(16, min(128, tile_bytes // (padded_head_dim * itemsize)))
