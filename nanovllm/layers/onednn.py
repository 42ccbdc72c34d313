"""Weights in oneDNN's own layout, in which x86 CPUs multiply few tokens about twice as fast.

What oneDNN can do depends on the CPU, the dtype and the version of torch; all of that is known here
alone. The layout is opaque: `to_dense()` undoes it.
"""

import platform

import torch
from torch import Tensor, nn

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
    if weight.device.type != "cpu" or not _has_onednn():
        return weight
    is_half = weight.itemsize == 2
    if is_half and not _has_instructions(weight.dtype) and _has_memory_for(8 * weight.numel()):
        data = weight.float()  # for a moment there are two copies in fp32
    elif not _can_multiply(weight.dtype):
        return weight
    copy = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(data), requires_grad=False)
    return keep_weight_loader(copy, weight)


def dense(weight: nn.Parameter) -> nn.Parameter:
    """Returns a plain copy of a `reordered` weight, to be loaded into; any other weight itself."""
    if not weight.is_mkldnn:
        return weight
    return keep_weight_loader(nn.Parameter(weight.to_dense(), requires_grad=False), weight)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


def _has_memory_for(num_bytes: int) -> bool:
    memory = host_memory()
    return memory.available - num_bytes > KEPT_MEMORY * memory.total


def _can_multiply(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies tensors of this dtype on this CPU, however slowly."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in this dtype itself.

    Where AVX-512 comes without bf16, oneDNN accepts bf16 but converts every weight to fp32.
    """
    has_bf16 = True
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        # Not there before torch 2.5.
        has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)()
    return has_bf16 and _can_multiply(dtype)
