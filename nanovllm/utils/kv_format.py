"""How K and V are held in 8 bits: the format, and its conversion in torch, which is the oracle of
the kernels' (kernels/kv_format.py).

The K of a token and K/V head is a scale times integers from -252 to 252, and so is its V. Each
integer is held as a float with 2 exponent and 5 mantissa bits: its code, a byte, has a sign and 7
bits, of which 0 to 63 stand for themselves, 64 to 95 for every second integer from 64 on, and 96 to
127 for every fourth from 128 on. E4M3 has as many bits, but rounds with four times the error:
docs/fp8_kv_cache.md.

The largest element gets the largest integer. The scale of V is a power of two, because kernels add
its logarithm to the scores. Every byte is the code of a finite number.
"""

from dataclasses import dataclass

import torch

LARGEST = 252
MIN_SCALE = 2.0**-96  # of zeros: it has an inverse
HALF_LOG2 = 19  # a code's bits, shifted into place, are an fp16 number of 2^-19 times the integer
HALF_SHIFT = 5
HALF_MASK = 0x8FE0  # sign, 2 exponent bits, 5 mantissa bits


@dataclass(frozen=True, slots=True)
class QuantisedKV:
    """K and V of some tokens, [..., head_dim].

    codes: uint8 [..., head_dim] each.
    scales: bf16 [..., 2], of K and of V.
    """

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor

    def dequantise(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V, rounded to `dtype`."""
        k_scale, v_scale = self.scales.float().unbind(-1)
        k, v = (
            (_integers(codes) * scale.unsqueeze(-1)).to(dtype)
            for codes, scale in ((self.k, k_scale), (self.v, v_scale))
        )
        return k, v


def quantise(k: torch.Tensor, v: torch.Tensor) -> QuantisedKV:
    """Rounds K and V [..., head_dim] to the nearest of what 8 bits and a scale can hold."""
    k, v = k.float(), v.float()
    k_scale, v_scale = (x.abs().amax(-1).mul(1 / LARGEST).clamp_min(MIN_SCALE) for x in (k, v))
    mantissa, exponent = torch.frexp(v_scale)
    exponent = exponent - (mantissa == 0.5).int()  # a power of two stays
    scales = torch.stack((k_scale, torch.ldexp(torch.ones_like(v_scale), exponent)), -1).bfloat16()
    k_scale, v_scale = scales.float().unbind(-1)
    return QuantisedKV(_codes(k, k_scale), _codes(v, v_scale), scales)


def _codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    size = x.abs() * (1 / scale).unsqueeze(-1)
    spacing = 1 + (size >= 64).float() + 2 * (size >= 128).float()
    code = (size / spacing).round() + 32 * (spacing - 1).clamp(max=2)
    code += 128 * (x < 0).float()
    return code.to(torch.uint8)


def _integers(codes: torch.Tensor) -> torch.Tensor:
    """Returns the integers that codes stand for, in fp32."""
    mask = HALF_MASK - 2**16  # as int16
    bits = (codes.view(torch.int8).to(torch.int16) << HALF_SHIFT) & mask
    return bits.view(torch.float16).float() * 2.0**HALF_LOG2
