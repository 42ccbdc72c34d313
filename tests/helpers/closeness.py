"""How close results of different kernels or batch shapes must be: within a multiple of what their
dtype rounds at the largest value.

Errors follow the largest value, not each one's own: where summands cancel, the rounding of the
summands stays. A wrong weight, position or mask is off by about the largest value itself.
"""

import torch

# Logits of the tiny models are off by 2 to 10 eps in every dtype, ours and Hugging Face's half
# precision alike. In fp32 a fault stands out by millions of eps, in bf16 by 128.
LOGITS_NUM_EPS = {torch.float32: 256, torch.float16: 32, torch.bfloat16: 16}


def assert_close(
    out: torch.Tensor, expected: torch.Tensor, *, num_eps: float, dtype: torch.dtype | None = None
) -> None:
    """Every element is within `num_eps` eps of `dtype` (by default `out`'s) times the largest."""
    assert out.shape == expected.shape
    assert out.isfinite().all()
    eps = torch.finfo(out.dtype if dtype is None else dtype).eps
    out, expected = out.detach().double().cpu(), expected.detach().double().cpu()
    error = float((out - expected).abs().max() / expected.abs().max())
    assert error <= num_eps * eps, f"off by {error / eps:.1f} eps, {num_eps} are allowed"


def assert_logits_close(
    logits: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """`dtype`: what the model of `logits` computes in."""
    assert_close(logits, reference, num_eps=LOGITS_NUM_EPS[dtype], dtype=dtype)
