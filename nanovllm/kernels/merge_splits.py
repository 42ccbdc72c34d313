"""Merges the results of programs that attended to parts of one context (Flash-Decoding)."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.tiles import has_dependent_launch


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr,  # fp32 [n * heads, num_splits, head_dim]
    lse_ptr,  # [n * heads, num_splits]
    out_ptr,  # [n * heads, head_dim]
    num_splits,
    SPLITS: tl.constexpr,  # num_splits, padded
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    HAS_PDL: tl.constexpr,  # programmatic dependent launch
):
    if HAS_PDL:  # the programs whose results these are may still run
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    is_split = split < num_splits
    lse = tl.load(lse_ptr + head * num_splits + split, mask=is_split, other=float("-inf"))
    weight = tl.exp2(lse - tl.maximum(tl.max(lse, 0), -1e30))  # 0 if all splits are empty
    total = tl.sum(weight, 0)
    mask = is_split[:, None] & (d < HEAD_DIM)[None, :]  # empty splits hold zeros
    offset = (head * num_splits + split)[:, None] * HEAD_DIM + d[None, :]
    partial = tl.load(partial_ptr + offset, mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def padded_splits(splits: int) -> int:
    """Returns for how many splits the kernel that merges `splits` of them is compiled."""
    return max(32, int(triton.next_power_of_2(splits)))


def merge_splits(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
    """Writes to `out` the mean of the splits' results, weighted by their softmax sums.

    partial fp32 [n, heads, splits, head_dim], 0 in empty splits; lse fp32 [n, heads, splits], base
    2, -inf for empty splits; out [n, heads, head_dim]. All contiguous.
    """
    n, num_heads, splits, head_dim = partial.shape
    has_pdl = has_dependent_launch(out.device)
    _merge_kernel[(n * num_heads,)](
        partial,
        lse,
        out,
        splits,
        SPLITS=padded_splits(splits),
        HEAD_DIM=head_dim,
        D=triton.next_power_of_2(head_dim),
        HAS_PDL=has_pdl,
        num_warps=padded_splits(splits) // 32,
        **({"launch_pdl": True} if has_pdl else {}),
    )
