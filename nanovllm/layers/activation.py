"""The gated activation of SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import cpu_kernels


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes SiLU(gate) * up: gate_up [..., 2 * n], gate | up -> [..., n]."""
    if gate_up.is_cuda:
        from nanovllm.kernels import activation

        return activation.silu_and_mul(gate_up)
    is_plain = gate_up.dtype == torch.float32 and gate_up.dim() == 2
    if is_plain and (cpu := cpu_kernels(gate_up)) is not None:
        out: Tensor = cpu.silu_and_mul(gate_up)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
