"""Products of few rows with a large weight, which is all that a decode step's projections are.

The weight is read once, so bandwidth is the limit. Where its rows are too few to occupy the GPU,
the sum over the input features is split as well, and the partial sums are left to the kernel that
reads the result. A way to multiply has `fits(weight)` and `multiply(x, weight)`: x [t, size],
contiguous, by weight [n, size] -> [t, n]; with `splits` partial sums of that, fp32 [splits, t, n];
if `is_gated`, SiLU(gate) * up of that, [t, n / 2].
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import silu_and_mul_tile
from nanovllm.kernels.tiles import shared_memory


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,  # [num_rows, size]
    weight_ptr,  # [num_outputs, size]
    out_ptr,  # [splits, num_rows, num_outputs], or [num_rows, num_outputs / 2] if IS_GATED
    num_rows,
    num_outputs,
    size,
    split_size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    split = tl.program_id(1)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :]
    if IS_GATED:  # 8 gates, then their 8 ups, and so on: a thread's part of `acc` has both
        tile_row = tl.arange(0, OUTPUTS)
        output = tl.program_id(0) * (OUTPUTS // 2) + tile_row // 16 * 8 + tile_row % 8
        output += tile_row // 8 % 2 * (num_outputs // 2)
    else:
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = output.to(tl.int64)[:, None]
    feature = split * split_size + tl.arange(0, DEPTH)
    is_row = row < num_rows
    weight_ptr += output * size + feature[None, :]
    x_ptr += row * size + feature[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for _ in range(0, split_size, DEPTH):
        x = tl.load(x_ptr, mask=is_row, other=0.0)
        acc = tl.dot(tl.load(weight_ptr), x, acc)
        weight_ptr += DEPTH
        x_ptr += DEPTH
    result = acc.to(out_ptr.dtype.element_ty)
    if IS_GATED:
        pairs = tl.permute(tl.reshape(result, OUTPUTS // 16, 2, 8, ROWS), 0, 2, 3, 1)
        gate, up = tl.split(tl.reshape(pairs, OUTPUTS // 2, ROWS, 2))
        result = silu_and_mul_tile(gate, up)
        output = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)[:, None]
        num_outputs = num_outputs // 2
    out_ptr += (split.to(tl.int64) * num_rows + row) * num_outputs + output
    tl.store(out_ptr, result, mask=is_row)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel of ours. A program computes `outputs` output features of `rows` rows, from a part of
    the input features, `depth` at a time; the weight lies along the wide side of tensor cores.
    is_gated: of its output features half are gates, and the others what they multiply."""

    rows: int
    outputs: int
    depth: int
    stages: int
    warps: int
    splits: int = 1
    is_gated: bool = False

    @property
    def kernel(self) -> "Tiling":
        """One of those that need the same compiled: any number of splits from two on does."""
        return replace(self, splits=min(self.splits, 2))

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether it divides the weight, and `stages` of its tiles fit into shared memory."""
        num_outputs, size = weight.shape
        stage_bytes = (self.rows + self.outputs) * self.depth * weight.element_size()
        return (
            num_outputs % self.outputs == 0
            and size % (self.depth * self.splits) == 0
            and self.stages * stage_bytes <= shared_memory(weight.device)
        )

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_rows, size = x.shape
        num_outputs = len(weight)
        if self.splits == 1:
            out = x.new_empty(num_rows, num_outputs // (1 + self.is_gated))
        else:
            out = x.new_empty(self.splits, num_rows, num_outputs, dtype=torch.float32)
        grid = (num_outputs // self.outputs, self.splits, triton.cdiv(num_rows, self.rows))
        _linear_kernel[grid](
            x,
            weight,
            out,
            num_rows,
            num_outputs,
            size,
            size // self.splits,
            ROWS=self.rows,
            OUTPUTS=self.outputs,
            DEPTH=self.depth,
            IS_GATED=self.is_gated,
            num_warps=self.warps,
            num_stages=self.stages,
        )
        return out


@dataclass(frozen=True, slots=True)
class Slices:
    """The library's kernel on slices of the input features. It may split the sum itself, but then
    adds up with a kernel of its own."""

    splits: int
    is_gated: ClassVar[bool] = False

    def fits(self, weight: torch.Tensor) -> bool:
        can_widen = "dtype" in torch.ops.aten.bmm.overloads()  # torch 2.8 and later
        return can_widen and weight.is_cuda and weight.shape[1] % (8 * self.splits) == 0

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x_slices = x.unflatten(1, (self.splits, -1)).transpose(0, 1)
        weight_slices = weight.unflatten(1, (self.splits, -1)).permute(1, 2, 0)
        return torch.bmm(x_slices, weight_slices, out_dtype=torch.float32)


# What was fastest in a sweep on an H200, by the largest number of rows it is for.
CANDIDATES: dict[int, list[Tiling | Slices]] = {
    16: [
        Tiling(16, 64, 64, stages=6, warps=4),
        Tiling(16, 64, 128, stages=3, warps=4),
        *(Tiling(16, 64, 64, stages=6, warps=4, splits=splits) for splits in (2, 4, 8)),
        Tiling(16, 64, 64, stages=5, warps=4, is_gated=True),
        Tiling(16, 64, 128, stages=6, warps=4, is_gated=True),
    ],
    64: [
        Tiling(64, 64, 64, stages=6, warps=4),
        Tiling(64, 64, 64, stages=4, warps=4),
        *(Tiling(64, 64, 64, stages=6, warps=4, splits=splits) for splits in (2, 4, 8)),
        Tiling(64, 128, 64, stages=6, warps=4, splits=4),
        Tiling(64, 64, 64, stages=4, warps=4, is_gated=True),
        Tiling(64, 64, 128, stages=5, warps=4, is_gated=True),
    ],
    128: [
        Tiling(64, 64, 64, stages=6, warps=4, splits=4),
        *(Tiling(128, 64, 64, stages=6, warps=8, splits=splits) for splits in (2, 4)),
        *(Slices(splits) for splits in (2, 4)),
        Tiling(128, 64, 64, stages=6, warps=8, is_gated=True),
    ],
    256: [
        Tiling(64, 64, 64, stages=6, warps=4, splits=2),
        Tiling(128, 64, 64, stages=6, warps=8, splits=4),
        *(Slices(splits) for splits in (2, 4)),
        Tiling(128, 128, 64, stages=5, warps=8, is_gated=True),
    ],
}
