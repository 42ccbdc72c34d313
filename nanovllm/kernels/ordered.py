"""Floats as integers that compare alike, so that thresholds can be searched bit by bit."""

import triton
import triton.language as tl


@triton.jit
def ordered_key(x, SHIFT: tl.constexpr):
    """Returns int32 keys of fp32 values that compare as the values do; -0 equals 0.

    SHIFT: low bits that are zero in all values, as in those converted from a narrower type.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of_key(key, SHIFT: tl.constexpr):
    """Returns the fp32 value that has this key."""
    low = ((1 << SHIFT) - 1) & (key >> 31)  # a negative value's low bits are ones in its key
    bits = (key << SHIFT) | low
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
