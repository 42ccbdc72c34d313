"""Defines the devices, shapes and tolerances that the tests of the Triton kernels share.

The tests run on a GPU, or else under Triton's interpreter. The interpreter runs small grids in fp32
and fp16 (its bf16 `tl.dot` is wrong); a GPU also runs the full grids and bf16.
"""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU
# Kernels sum in fp32, so in half precision little more than inputs and results is rounded.
NUM_EPS = {torch.float32: 200, torch.float16: 3, torch.bfloat16: 3}
# (heads, kv_heads, head_dim): head sizes, GQA ratios 1, 2, 7, 8, K/V widths 72, 192, 1024
SHAPES = [(3, 3, 24), (6, 3, 64), (8, 1, 96), (7, 1, 80)]
GPU_SHAPES = [(16, 8, 128), (9, 3, 64), (14, 2, 96), (32, 4, 256), (8, 8, 128), (8, 1, 40)]
shapes = pytest.mark.parametrize("shape", SHAPES + GPU_SHAPES * HAS_GPU, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def assert_near(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Asserts that the norm of the error, relative to that of `expected`, is within `NUM_EPS` eps
    of `dtype`."""
    assert out.shape == expected.shape
    assert out.isfinite().all()
    out, expected = out.detach().double(), expected.detach().double()
    error = float((out - expected).norm() / expected.norm())
    num_eps = error / torch.finfo(dtype).eps
    assert num_eps < NUM_EPS[dtype], f"relative error {error:.2e}, {num_eps:.1f} eps"
