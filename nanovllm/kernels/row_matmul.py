"""Matmuls of one to a few tokens with a large weight, without tensor cores.

A program holds its part of the weight, some output features over all input features, in registers.
It fetches that part before it waits for the kernel before (see dependent_launch.py), so the weight
is on its way while other kernels run one after the other for lack of anything to do at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import silu_and_mul_tile
from nanovllm.kernels.dependent_launch import (
    dependent_launch,
    let_next_start,
    wait_for_previous,
)

CHUNK = tl.constexpr(128)  # input features that half a warp reads at once
MAX_CHUNKS = 16  # that half a warp holds: 64 registers of a thread


@triton.jit
def _sums(weight, x):
    """Sums weight [n, c, CHUNK] times x of the same shape over c and CHUNK -> fp32 [n]."""
    products = weight.to(tl.float32) * x.to(tl.float32)
    return tl.sum(tl.sum(products, 1), 1)  # c first: a thread has all or most of it


@triton.jit(do_not_specialize=["M"])
def _row_matmul_kernel(
    x_ptr,  # [M, K]: tokens, input features
    weight_ptr,  # [N, K]: output features, input features
    out_ptr,  # [split_k, M, N], or [M, N / 2] if SILU_EPILOGUE
    M,
    N,
    K,
    k_per_split,
    MOST: tl.constexpr,  # a bound on M
    BLOCK_N: tl.constexpr,  # results per token of a program
    CHUNKS: tl.constexpr,  # in k_per_split, padded
    SILU_EPILOGUE: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    let_next_start(HAS_PDL)
    split = tl.program_id(1)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, CHUNKS)[None, :, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    in_k = k < k_per_split
    num_results = N // 2 if SILU_EPILOGUE else N
    weight_ptr += n[:, None, None] * K + split * k_per_split + k
    weight = tl.load(weight_ptr, mask=in_k, other=0.0)
    if SILU_EPILOGUE:
        up_weight = tl.load(weight_ptr + num_results * K, mask=in_k, other=0.0)
    x_ptr += split * k_per_split
    wait_for_previous(HAS_PDL)
    token = tl.arange(0, MOST)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    results = tl.zeros([BLOCK_N, MOST], dtype)
    for m in tl.static_range(MOST):
        # As wide as the weight, or Triton would move the weight to the registers' layout of x.
        x_tile_ptr = tl.broadcast_to(x_ptr + m * K + k, [BLOCK_N, CHUNKS, CHUNK])
        x = tl.load(x_tile_ptr, mask=k < tl.where(m < M, k_per_split, 0), other=0.0)
        result = _sums(weight, x).to(dtype)
        if SILU_EPILOGUE:
            result = silu_and_mul_tile(result, _sums(up_weight, x).to(dtype))
        results = tl.where(token == m, result[:, None], results)
    out_ptr += (split * M + token) * num_results + n[:, None]
    tl.store(out_ptr, results, mask=token < M)


@dataclass(frozen=True, slots=True)
class RowMatmul:
    """The kernel above, with half a warp for each output feature, or for each gate with its up.

    most: tokens that it is compiled for.
    """

    most: int
    warps: int
    split_k: int = 1
    has_silu_epilogue: bool = False

    def supports(self, weight: torch.Tensor) -> bool:
        """Whether programs divide the weight, and hold their part of it in registers."""
        num_outputs, size = weight.shape
        return (
            num_outputs % self._rows == 0
            and size % (16 * self.split_k) == 0
            and self._chunks(weight) * (1 + self.has_silu_epilogue) <= MAX_CHUNKS
        )

    def compiled_as(self, weight: torch.Tensor) -> object:
        return self, self._chunks(weight)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_tokens, size = x.shape
        assert num_tokens <= self.most
        num_outputs = len(weight)
        if self.split_k == 1:
            out = x.new_empty(num_tokens, num_outputs // (1 + self.has_silu_epilogue))
        else:
            out = x.new_empty(self.split_k, num_tokens, num_outputs, dtype=torch.float32)
        _row_matmul_kernel[(num_outputs // self._rows, self.split_k)](
            x,
            weight,
            out,
            num_tokens,
            num_outputs,
            size,
            size // self.split_k,
            MOST=self.most,
            BLOCK_N=2 * self.warps,
            CHUNKS=self._chunks(weight),
            SILU_EPILOGUE=self.has_silu_epilogue,
            num_warps=self.warps,
            **dependent_launch(x.device),
        )
        return out

    @property
    def _rows(self) -> int:
        """The rows of the weight of a program."""
        return 2 * self.warps * (1 + self.has_silu_epilogue)

    def _chunks(self, weight: torch.Tensor) -> int:
        """Returns the chunks of a program's input features, padded."""
        size = weight.shape[1] // self.split_k
        return int(triton.next_power_of_2(triton.cdiv(size, CHUNK.value)))
