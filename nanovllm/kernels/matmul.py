"""Matmuls of few tokens with a large weight, which is all that a decode step's projections are.

The weight is read once, so memory bandwidth is the limit. Where the output features are too few to
occupy the GPU, the sum over the input features is split as well (split-K), and the partial sums are
left to the norm that reads the result. A gate-and-up projection can apply SiLU(gate) * up in the
epilogue.

A matmul has `supports(weight)`, `compiled_as(weight)`, which is equal where the compiled code is,
and is called with x [t, size], contiguous, and weight [n, size]. It returns [t, n]; with
`split_k` > 1 partial sums, fp32 [split_k, t, n]; with `has_silu_epilogue` [t, n / 2].
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import silu_and_mul_tile
from nanovllm.kernels.dependent_launch import (
    dependent_launch,
    let_next_start,
    prefetch,
    wait_for_previous,
)
from nanovllm.kernels.row_matmul import RowMatmul
from nanovllm.kernels.tiles import shared_memory

PREFETCHED = tl.constexpr(512)  # input features: more of many programs may not fit into the cache


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    x_ptr,  # [M, K]: tokens, input features
    weight_ptr,  # [N, K]: output features, input features
    out_ptr,  # [split_k, M, N], or [M, N / 2] if SILU_EPILOGUE
    M,
    N,
    K,
    k_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU_EPILOGUE: tl.constexpr,
    IS_EARLY: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    if IS_EARLY:
        let_next_start(HAS_PDL)
    split = tl.program_id(1)
    m = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[None, :]
    if SILU_EPILOGUE:  # 8 gates, then their 8 ups, and so on: a thread's part of `acc` has both
        i = tl.arange(0, BLOCK_N)
        n = tl.program_id(0) * (BLOCK_N // 2) + i // 16 * 8 + i % 8
        n += i // 8 % 2 * (N // 2)
    else:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = n.to(tl.int64)[:, None]
    if IS_EARLY and HAS_PDL:  # the weight's first columns, while the kernel before still runs
        line = tl.minimum(tl.arange(0, PREFETCHED // 64) * 64, k_per_split - 1)
        prefetch(weight_ptr + n * K + split * k_per_split + line[None, :])
    wait_for_previous(HAS_PDL)
    k = split * k_per_split + tl.arange(0, BLOCK_K)
    in_m = m < M
    weight_ptr += n * K + k[None, :]
    x_ptr += m * K + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(0, k_per_split, BLOCK_K):
        x = tl.load(x_ptr, mask=in_m, other=0.0)
        acc = tl.dot(tl.load(weight_ptr), x, acc)
        weight_ptr += BLOCK_K
        x_ptr += BLOCK_K
    if not IS_EARLY:
        let_next_start(HAS_PDL)
    result = acc.to(out_ptr.dtype.element_ty)
    if SILU_EPILOGUE:
        pairs = tl.permute(tl.reshape(result, BLOCK_N // 16, 2, 8, BLOCK_M), 0, 2, 3, 1)
        gate, up = tl.split(tl.reshape(pairs, BLOCK_N // 2, BLOCK_M, 2))
        result = silu_and_mul_tile(gate, up)
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[:, None]
    num_results = N // 2 if SILU_EPILOGUE else N
    tl.store(out_ptr + (split.to(tl.int64) * M + m) * num_results + n, result, mask=in_m)


@dataclass(frozen=True, slots=True)
class TritonMatmul:
    """The kernel above with its tile sizes. The weight lies along the wide side of tensor cores.

    block_m, block_n, block_k: tokens, output features and input features of a tile.
    stages: tiles on their way at a time.
    is_early: whether to start the next kernel, and to fetch the weight, at once; for few tokens.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    split_k: int = 1
    has_silu_epilogue: bool = False
    is_early: bool = False

    def supports(self, weight: torch.Tensor) -> bool:
        """Whether the tiles divide the weight and `stages` of them fit into shared memory."""
        num_outputs, size = weight.shape
        stage_bytes = (self.block_m + self.block_n) * self.block_k * weight.element_size()
        return (
            num_outputs % self.block_n == 0
            and size % (self.block_k * self.split_k) == 0
            and self.stages * stage_bytes <= shared_memory(weight.device)
        )

    def compiled_as(self, weight: torch.Tensor) -> object:
        return self

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_tokens, size = x.shape
        num_outputs = len(weight)
        if self.split_k == 1:
            out = x.new_empty(num_tokens, num_outputs // (1 + self.has_silu_epilogue))
        else:
            out = x.new_empty(self.split_k, num_tokens, num_outputs, dtype=torch.float32)
        grid = (num_outputs // self.block_n, self.split_k, triton.cdiv(num_tokens, self.block_m))
        _matmul_kernel[grid](
            x,
            weight,
            out,
            num_tokens,
            num_outputs,
            size,
            size // self.split_k,
            BLOCK_M=self.block_m,
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            SILU_EPILOGUE=self.has_silu_epilogue,
            IS_EARLY=self.is_early,
            num_warps=self.warps,
            num_stages=self.stages,
            **dependent_launch(x.device),
        )
        return out


@dataclass(frozen=True, slots=True)
class LibrarySplitK:
    """The library's batched matmul over slices of the input features, one batch entry for each.

    The library may split K by itself, but then adds up with a kernel of its own.
    """

    split_k: int
    has_silu_epilogue: ClassVar[bool] = False

    def supports(self, weight: torch.Tensor) -> bool:
        can_widen = "dtype" in torch.ops.aten.bmm.overloads()  # torch 2.8 and later
        return can_widen and weight.is_cuda and weight.shape[1] % (8 * self.split_k) == 0

    def compiled_as(self, weight: torch.Tensor) -> object:
        return self

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x_slices = x.unflatten(1, (self.split_k, -1)).transpose(0, 1)
        weight_slices = weight.unflatten(1, (self.split_k, -1)).permute(1, 2, 0)
        return torch.bmm(x_slices, weight_slices, out_dtype=torch.float32)


Candidate = TritonMatmul | RowMatmul | LibrarySplitK


def _narrow(is_early: bool) -> list[Candidate]:
    """Returns matmuls with the narrowest tile of tokens."""
    return [
        TritonMatmul(16, 64, 64, 6, 4, split_k=4, is_early=is_early),
        TritonMatmul(16, 64, 64, 5, 4, has_silu_epilogue=True, is_early=is_early),
        TritonMatmul(16, 64, 128, 6, 4, has_silu_epilogue=True, is_early=is_early),
    ]


def _few(most: int) -> list[Candidate]:
    """Returns matmuls of up to `most` tokens, at most `FEW_TOKENS`.

    The more tokens a `RowMatmul` takes, the longer its compilation: those that were never the
    fastest are left out.
    """
    rows = [RowMatmul(most, warps=4), RowMatmul(most, warps=4, split_k=3)]
    if most <= 2:
        rows.append(RowMatmul(most, warps=4, has_silu_epilogue=True))
    if most == 1:
        rows += [RowMatmul(1, warps=8), RowMatmul(1, warps=8, has_silu_epilogue=True)]
    return [*rows, *_narrow(is_early=True)]


# By the most tokens that they are for: what is fastest on an H200 for the layers of two models.
# docs/benchmarks/2026-12-01-ablation.md says what each of them brings, and
# docs/benchmarks/2026-12-01-dependent-launch.md those for few tokens.
CANDIDATES: dict[int, list[Candidate]] = {
    1: _few(1),
    2: _few(2),
    4: _few(4),
    16: _narrow(is_early=False),
    64: [
        TritonMatmul(64, 64, 64, stages=6, warps=4, split_k=4),
        TritonMatmul(64, 64, 64, stages=4, warps=4, has_silu_epilogue=True),
        TritonMatmul(64, 64, 128, stages=5, warps=4, has_silu_epilogue=True),
    ],
    256: [LibrarySplitK(2)],
}
