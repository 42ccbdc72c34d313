"""RMSNorm fused with the residual add before it, and with the sum of what comes in parts; rounds
where the torch layer does."""

import torch
import triton
import triton.language as tl


@triton.jit
def normalised(x, weight, size, eps):
    """The norm of one row, in its dtype; x is 0 beyond `size`."""
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32) / size + eps)
    normed = (x32 * scale).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def load_sum(x_ptr, row, num_rows, size, cols, mask, dtype: tl.constexpr, PARTS: tl.constexpr):
    """The sum of a row over x's parts, [PARTS, num_rows, size], in `dtype`."""
    row_ptr = x_ptr + row * size + cols
    total = tl.load(row_ptr, mask=mask, other=0.0)
    for _ in tl.static_range(1, PARTS):
        row_ptr += num_rows.to(tl.int64) * size
        total += tl.load(row_ptr, mask=mask, other=0.0)
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
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = load_sum(x_ptr, row, tl.num_programs(0), size, cols, mask, dtype, PARTS)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * size + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * size + cols, x, mask=mask)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + cols, normalised(x, weight, size, eps), mask=mask)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [t, size] -> (norm(x + residual), x + residual); the sum replaces `residual`.
    x may come in parts, fp32 [n, t, size], with a residual."""
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
    )
    return out, x if residual is None else residual
