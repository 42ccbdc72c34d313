"""RMSNorm (arXiv:1910.07467) fused with the residual add before it, and with the sum of the partial
results of a split-K matmul or of the experts; rounded at the same points as the torch layer."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import (
    FEW_TOKENS,
    dependent_launch,
    let_next_start,
    wait_for_previous,
)


@triton.jit
def rms_norm(x, weight, size, eps):
    """Returns the RMSNorm of one token's hidden state, in its dtype. x is 0 beyond `size`."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32) / size + eps)
    normed = (x32 * scale).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def load_sum(x_ptr, token, num_tokens, size, cols, mask, dtype: tl.constexpr, PARTS: tl.constexpr):
    """Sums a token's hidden states over x [PARTS, num_tokens, size], in fp32; returns `dtype`."""
    token_ptr = x_ptr + token * size + cols
    total = tl.load(token_ptr, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        token_ptr += num_tokens.to(tl.int64) * size
        total += tl.load(token_ptr, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    size,
    eps,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    let_next_start(HAS_PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    wait_for_previous(HAS_PDL)
    x = load_sum(x_ptr, token, tl.num_programs(0), size, cols, mask, dtype, PARTS)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * size + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + token * size + cols, x, mask=mask)
    tl.store(out_ptr + token * size + cols, rms_norm(x, weight, size, eps), mask=mask)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual and normalises the sum, which replaces the contents of `residual`.

    x, residual [t, size] -> (norm(x + residual), x + residual), [t, size] each. With a residual x
    may come as n partial sums, [n, t, size]; without one the second result is x itself.
    """
    num_tokens, size = x.shape[-2:]
    out = weight.new_empty(num_tokens, size)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        size,
        eps,
        PARTS=len(x) if x.dim() == 3 else 1,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **dependent_launch(x.device, is_worth_it=num_tokens <= FEW_TOKENS),
    )
    return out, x if residual is None else residual
