"""Weights in oneDNN's own layout, in which x86 CPUs multiply few tokens about twice as fast.

The layout is opaque: `to_dense()` undoes it.
"""

import torch
from torch import Tensor, nn

from nanovllm.utils import cpu_features
from nanovllm.utils.host_memory import host_memory
from nanovllm.utils.loader import keep_weight_loader

KEPT_MEMORY = 0.25  # the fraction of the host's memory that fp32 copies leave to others


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x W^T (+ bias) for a `reordered` weight, in the weight's dtype; returns x's."""
    dtype = x.dtype
    bias = None if bias is None else bias.to(weight.dtype)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x.to(weight.dtype), weight, bias, "none", [], ""
    )
    return out.to(dtype)


def reordered(weight: nn.Parameter) -> nn.Parameter:
    """Returns a copy of `weight` [n, size] in oneDNN's layout; where that is no help, `weight`.

    A CPU without instructions for a half-precision dtype multiplies several times as fast in fp32:
    the copy is in fp32 there, if the host has memory to spare. The copy keeps the weight loader.
    """
    data: Tensor = weight
    if weight.device.type != "cpu" or not cpu_features.has_onednn():
        return weight
    is_slow = weight.itemsize == 2 and not cpu_features.has_instructions(weight.dtype)
    if is_slow and _has_memory_for(8 * weight.numel()):
        data = weight.float()  # for a moment there are two copies in fp32
    elif not cpu_features.can_multiply(weight.dtype):
        return weight
    copy = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(data), requires_grad=False)
    return keep_weight_loader(copy, weight)


def dense(weight: nn.Parameter) -> nn.Parameter:
    """Returns a plain copy of a `reordered` weight, to be loaded into; any other weight itself."""
    if not weight.is_mkldnn:
        return weight
    return keep_weight_loader(nn.Parameter(weight.to_dense(), requires_grad=False), weight)


def _has_memory_for(num_bytes: int) -> bool:
    memory = host_memory()
    return memory.available - num_bytes > KEPT_MEMORY * memory.total
