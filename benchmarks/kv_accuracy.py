"""Measures the accuracy of K and V in 8 bits: perplexity, and the error of teacher-forced logits.

Run: python -m benchmarks.kv_accuracy --model DIR --text FILE [--tokens 2048] [--windows 2]
     [--outlier 50]

The model is that of transformers, on the CPU, whose attention gets K and V as an engine with
`kv_cache_dtype="fp8"` stores them. Errors are relative to float32, in the Frobenius norm over all
logits of a window. `ratio` compares with the error of bfloat16 weights and activations alone.
`e4m3` is for comparison: the largest element of a token's head gets 448.

--outlier: scales one channel of each k_proj, before RoPE, by so much. Such a model writes nonsense;
    what counts is that K in 8 bits is no further from float32 than bfloat16 is.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanovllm.utils.kv_format import quantise

OUTLIER_CHANNEL = 5
Rounding = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def as_is(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k, v


def fp8(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return quantise(k, v).dequantise(k.dtype)


def e4m3(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rounded = []
    for x in (k.float(), v.float()):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        rounded.append(((x / scale).to(torch.float8_e4m3fn).float() * scale).to(k.dtype))
    return rounded[0], rounded[1]


VARIANTS: tuple[tuple[str, torch.dtype, Rounding], ...] = (
    ("bfloat16", torch.bfloat16, as_is),
    ("bfloat16, fp8 K/V", torch.bfloat16, fp8),
    ("float32, fp8 K/V", torch.float32, fp8),
    ("bfloat16, e4m3 K/V", torch.bfloat16, e4m3),
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A variant's perplexity, and the error of its logits relative to float32."""

    name: str
    perplexity: float
    error: float


class RoundedKV:
    """Attention of transformers over K and V that `rounding` has changed."""

    def __init__(self) -> None:
        self.rounding: Rounding = as_is

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        k, v = self.rounding(k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None


def load(path: str, dtype: torch.dtype, outlier: float) -> Any:
    """Loads a model whose attention is "rounded_kv"."""
    options: Any = {"attn_implementation": "rounded_kv", "local_files_only": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    model = loaded.to(dtype).eval()
    for layer in model.model.layers if outlier != 1 else []:
        layer.self_attn.k_proj.weight.data[OUTLIER_CHANNEL] *= outlier
    return model


@torch.inference_mode()
def measure(path: str, windows: Tensor, outlier: float = 1.0) -> list[Accuracy]:
    """Returns the accuracy of float32 and of `VARIANTS` on windows of token ids [n, length]."""
    attention = RoundedKV()
    ALL_ATTENTION_FUNCTIONS.register("rounded_kv", attention)
    models = {dtype: load(path, dtype, outlier) for dtype in (torch.float32, torch.bfloat16)}
    variants = (("float32", torch.float32, as_is), *VARIANTS)
    losses, errors = torch.zeros(len(variants)), torch.zeros(len(variants))
    for ids in windows:
        reference = None
        for i, (_, dtype, rounding) in enumerate(variants):
            attention.rounding = rounding
            logits = models[dtype](ids[None]).logits[0].float()
            reference = logits if reference is None else reference
            losses[i] += F.cross_entropy(logits[:-1], ids[1:]) / len(windows)
            errors[i] += (logits - reference).norm() / reference.norm() / len(windows)
    return [
        Accuracy(name, float(loss.exp()), float(error))
        for (name, _, _), loss, error in zip(variants, losses, errors, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--text", type=Path, required=True, help="plain text to predict")
    parser.add_argument("--tokens", type=int, default=2048, help="length of a window")
    parser.add_argument("--windows", type=int, default=2, help="windows, evenly over the text")
    parser.add_argument("--outlier", type=float, default=1.0, help="scale of a channel of K")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    ids = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[0]
    starts = torch.linspace(0, len(ids) - args.tokens, args.windows + 1)[:-1].long()
    windows = torch.stack([ids[start : start + args.tokens] for start in starts])
    results = measure(args.model, windows, args.outlier)
    own = results[1]
    print(f"{args.model}, {args.windows} x {args.tokens} tokens, outlier {args.outlier:g}")
    for result in results:
        change = result.perplexity / own.perplexity - 1
        ratio = result.error / own.error
        print(
            f"  {result.name:20} perplexity {result.perplexity:9.3f} ({change:+.2%} of bfloat16), "
            f"logits off by {result.error:.2%}, ratio {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
