"""Chooses how a CPU keeps the weights of matmuls between loads, and multiplies by them.

Packed, for the kernels of kernels/cpu, where these are there and the CPU either has no instructions
for the weights' half precision or the weights are in fp32; activations are in fp32 then. In
oneDNN's layout where the CPU multiplies in half precision itself, or numba is missing. Else as they
are.
"""

import torch
from torch import Tensor, nn

from nanovllm.kernels import cpu_module, cpu_multiplies
from nanovllm.layers import onednn
from nanovllm.utils.loader import keep_weight_loader


class PackedWeight(nn.Parameter):
    """A weight in the layout of kernels/cpu/matmul.py; `num_features` of its outputs exist."""

    num_features: int


def are_packed(weight: Tensor) -> bool:
    """Whether weights like this one, on its device and in its dtype, are kept packed."""
    return weight.is_cpu and cpu_multiplies(weight.dtype)


def activation_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of the activations that are multiplied by weights like this one."""
    return torch.float32 if are_packed(weight) else weight.dtype


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """Returns rows of an embedding's weight, which may be packed: ids int64 [t] -> [t, size]."""
    if isinstance(weight, PackedWeight):
        cpu = cpu_module()
        assert cpu is not None
        found: Tensor = cpu.rows(weight, ids)
        return found
    return nn.functional.embedding(ids, weight)


def arranged(weight: nn.Parameter) -> nn.Parameter:
    """Returns a copy of `weight` [n, size] in the layout that is fastest here, or itself."""
    if not are_packed(weight):
        return onednn.reordered(weight)
    cpu = cpu_module()
    assert cpu is not None
    data = cpu.pack(weight.data)
    packed: PackedWeight = torch.Tensor._make_subclass(PackedWeight, data, False)
    packed.num_features = len(weight)
    return keep_weight_loader(packed, weight)


def plain(weight: nn.Parameter) -> nn.Parameter:
    """Returns a copy of an `arranged` weight in the checkpoint's layout, to be loaded into."""
    if not isinstance(weight, PackedWeight):
        return onednn.dense(weight)
    cpu = cpu_module()
    assert cpu is not None
    data = cpu.unpack(weight.data, weight.num_features)
    return keep_weight_loader(nn.Parameter(data, requires_grad=False), weight)


def converted(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Returns the parameter in `dtype`: itself if it has that, else a copy."""
    if param.dtype == dtype:
        return param
    return keep_weight_loader(nn.Parameter(param.to(dtype), requires_grad=False), param)


def arranged_bias(bias: nn.Parameter, weight: Tensor) -> nn.Parameter:
    """Returns the bias in fp32, as kernels/cpu takes it, if its weight is packed."""
    if not isinstance(weight, PackedWeight):
        return bias
    cpu = cpu_module()
    assert cpu is not None
    return keep_weight_loader(nn.Parameter(cpu.padded(bias.data), requires_grad=False), bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x W^T (+ bias) for an `arranged` weight; x [..., size] -> [..., n] in x's dtype."""
    if isinstance(weight, PackedWeight):
        cpu = cpu_module()
        assert cpu is not None
        rows = x.reshape(-1, x.shape[-1]).float()
        out: Tensor = cpu.linear(rows, weight, weight.num_features, bias)
        return out.view(*x.shape[:-1], weight.num_features).to(x.dtype)
    if weight.is_mkldnn:
        return onednn.onednn_linear(x, weight, bias)
    return nn.functional.linear(x, weight, bias)
