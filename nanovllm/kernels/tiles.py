"""What kernels need to know of a GPU, and the size of the attention tiles that fit into it."""

import functools

import torch
import triton


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program may use.

    The interpreter has no limit; there the figure is a Hopper GPU's.
    """
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    if hasattr(properties, "shared_memory_per_block_optin"):  # torch 2.7 and later
        return int(properties.shared_memory_per_block_optin)
    utils = triton.runtime.driver.active.utils
    return int(utils.get_device_properties(device.index)["max_shared_mem"])


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Returns whether a kernel may start while the one before it still runs (programmatic dependent
    launch, on Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def attention_tile(padded_head_dim: int, itemsize: int, tile_bytes: int = 8 * 1024) -> int:
    """Returns tokens per K or V tile of about `tile_bytes`: 128 at most, and the 16 of tl.dot."""
    return max(16, min(128, tile_bytes // (padded_head_dim * itemsize)))
