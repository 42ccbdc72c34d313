"""What kernels need to know of a GPU, and the size of the attention tiles that fit into it."""

import functools
from typing import Any

import torch
import triton

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None


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


def tile_descriptor(tensor: torch.Tensor, block: tuple[int, int]) -> Any:
    """Returns what the GPU's copy engine (on Hopper and later) needs to read tiles of `block` rows
    and columns from a 2-dimensional tensor. None without such an engine, before Triton 3.4, and for
    rows that the engine cannot read. The interpreter has an engine."""
    is_aligned = tensor.shape[1] * tensor.element_size() % 16 == 0
    if TensorDescriptor is None or not is_aligned:
        return None
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) < (9, 0):
        return None
    return TensorDescriptor.from_tensor(tensor, list(block))


def attention_tile(padded_head_dim: int, itemsize: int, tile_bytes: int = 8 * 1024) -> int:
    """Returns tokens per K or V tile of about `tile_bytes`: 128 at most, and the 16 of tl.dot."""
    return max(16, min(128, tile_bytes // (padded_head_dim * itemsize)))
