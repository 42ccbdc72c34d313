"""Compares results of different kernels or batch shapes: they may differ by a multiple of the
rounding error of the largest value in their dtype.

The tolerance is relative to the largest value rather than to each value, because where summands
cancel, their rounding errors remain. A wrong weight, position or mask causes an error of about the
largest value itself.
"""

import torch

# Logits of the tiny models are off by 2 to 10 eps in every dtype, both ours and those of Hugging
# Face in half precision. A bug causes an error of millions of eps in fp32, and of 128 in bf16.
LOGITS_NUM_EPS = {torch.float32: 256, torch.float16: 32, torch.bfloat16: 16}


def assert_close(
    out: torch.Tensor, expected: torch.Tensor, *, num_eps: float, dtype: torch.dtype | None = None
) -> None:
    """Asserts that every element's error is within `num_eps` eps of `dtype` (by default that of
    `out`) times the largest element."""
    assert out.shape == expected.shape
    assert out.isfinite().all()
    eps = torch.finfo(out.dtype if dtype is None else dtype).eps
    out, expected = out.detach().double().cpu(), expected.detach().double().cpu()
    error = float((out - expected).abs().max() / expected.abs().max())
    assert error <= num_eps * eps, f"off by {error / eps:.1f} eps, {num_eps} are allowed"


def assert_logits_close(
    logits: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """Asserts that `logits`, which a model computed in `dtype`, are close to `reference`."""
    assert_close(logits, reference, num_eps=LOGITS_NUM_EPS[dtype], dtype=dtype)
