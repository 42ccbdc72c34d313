"""The gated activation of SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes SiLU(gate) * up: gate_up [..., 2 * n], gate | up -> [..., n]."""
    if gate_up.is_cuda:
        from nanovllm.kernels import activation

        return activation.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
