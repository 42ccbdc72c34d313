"""K and V in 8 bits, as utils/kv_format.py defines them, in Triton kernels.

Attention multiplies in fp16, which holds the integers of K and V exactly, and applies the scales
outside of the products: that of a key's K to its scores, that of its V to its probability. Queries
in bf16 may exceed fp16, so each is divided by a power of two first.
"""

import torch
import triton
import triton.language as tl

from nanovllm.utils.kv_format import HALF_LOG2, HALF_MASK, HALF_SHIFT, LARGEST, MIN_SCALE

_INVERSE = tl.constexpr(1 / LARGEST)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_SHIFT = tl.constexpr(HALF_SHIFT)
_MASK = tl.constexpr(HALF_MASK - 2**16)  # as int16
_HALF_LOG2 = tl.constexpr(HALF_LOG2)
_EXPONENT = tl.constexpr(0x7F800000)  # these bits of an fp32
_ONES = tl.constexpr(0x3F803F80)  # a pair of scales
_ROUND = tl.constexpr(1.5 * 2**23)  # to add and subtract it rounds an fp32 to an integer


@triton.jit
def kv_scale(largest, IS_POWER_OF_TWO: tl.constexpr):
    """Returns the scale of K or V of this largest size: fp32, exact in bf16."""
    bits = tl.maximum(largest * _INVERSE, _MIN_SCALE).to(tl.int32, bitcast=True)
    if IS_POWER_OF_TWO:  # rounded up
        bits = (bits + 0x7FFFFF) & _EXPONENT
    else:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quantised(x, inverse):
    """Returns the codes of x, uint8, and the integers that they stand for, fp32.

    inverse: one over the scale.
    """
    size = tl.abs(x) * inverse
    doublings = tl.where(size >= 128, 2.0, tl.where(size >= 64, 1.0, 0.0))
    spacing = tl.where(size >= 128, 4.0, tl.where(size >= 64, 2.0, 1.0))
    mantissa = (size / spacing + _ROUND) - _ROUND
    codes = mantissa + 32 * doublings + tl.where(x < 0, 128.0, 0.0)
    integers = mantissa * spacing
    return codes.to(tl.int32).to(tl.uint8), tl.where(x < 0, -integers, integers)


@triton.jit
def widened(codes, DTYPE: tl.constexpr, IS_ON_GPU: tl.constexpr, IS_MOVABLE: tl.constexpr):
    """Returns the integers of codes times 2^-HALF_LOG2, which all are fp16 numbers.

    IS_MOVABLE: False keeps the compiler from moving this behind a transposition, for which it would
        read single bytes from shared memory.
    """
    if IS_ON_GPU:  # 6 instructions for 4 codes
        halves = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            prmt.b32 low, $2, 0, 0x9180;
            prmt.b32 high, $2, 0, 0xb3a2;
            shl.b32 low, low, 5;
            shl.b32 high, high, 5;
            and.b32 $0, low, 0x8fe08fe0;
            and.b32 $1, high, 0x8fe08fe0;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=IS_MOVABLE,
            pack=4,
        )
    else:
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << _SHIFT) & _MASK
        halves = bits.to(tl.float16, bitcast=True)
    return halves.to(DTYPE)


@triton.jit
def load_scales(scales_ptr, index, mask):
    """Returns what attention needs of keys' scales: K's; the base-2 logarithm of V's, and one over
    V's. Those of V are of `widened` V. Keys outside of the mask have scales of one.

    scales_ptr: int32, pairs of bf16.
    """
    pair = tl.load(scales_ptr + index, mask=mask, other=_ONES)
    k_scale = (pair << 16).to(tl.float32, bitcast=True)
    exponent = (pair >> 23) - 127 + _HALF_LOG2
    v_inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return k_scale, exponent.to(tl.float32), v_inverse


@triton.jit
def fitted_queries(q, scale):
    """Returns queries [n, d] for products with `widened` K, and their softmax scales [n]."""
    scales = tl.full([q.shape[0]], 1.0, tl.float32) * scale
    if q.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        power = (largest.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
        power = tl.where(power > 0, power, 1.0)
        q = (q.to(tl.float32) / power[:, None]).to(tl.float16)
        scales *= power
    return q, scales * tl.exp2(_HALF_LOG2 * 1.0)


def scale_pairs(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales of a cache, bf16 [num_blocks, kv_heads, block_size, 2], as `load_scales`
    takes them."""
    return scales.view(torch.int32)
