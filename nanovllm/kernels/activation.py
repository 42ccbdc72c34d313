"""SiLU(gate) * up in one pass, rounded at the same points as the torch layer."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import (
    dependent_launch,
    let_next_start,
    wait_for_previous,
)

BLOCK = 1024


@triton.jit
def silu_and_mul_tile(gate, up):
    """Returns SiLU(gate) * up in the dtype of both, of which each factor is computed in fp32."""
    gate32 = gate.to(tl.float32)
    activated = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, HAS_PDL: tl.constexpr):
    let_next_start(HAS_PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    wait_for_previous(HAS_PDL)
    gate = tl.load(gate_up_ptr + token * 2 * size + cols, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * 2 * size + size + cols, mask=mask, other=0.0)
    tl.store(out_ptr + token * size + cols, silu_and_mul_tile(gate, up), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns SiLU(gate) * up of each token.

    gate_up [t, 2 * size], gate | up -> [t, size]
    """
    num_tokens, double = gate_up.shape
    size = double // 2
    out = gate_up.new_empty(num_tokens, size)
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        gate_up,
        out,
        size,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent_launch(gate_up.device),
    )
    return out
