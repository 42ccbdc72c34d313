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


def attention_tile(padded_head_dim: int, itemsize: int, tile_bytes: int = 8 * 1024) -> int:
    """Tokens per K or V tile of about `tile_bytes`; at least what tl.dot needs."""
    return max(16, min(128, tile_bytes // (padded_head_dim * itemsize)))
