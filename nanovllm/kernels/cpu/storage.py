"""How CPU kernels hold numbers: numba has no half precision, so its bits are held in integers."""

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

STORAGE = {
    torch.bfloat16: types.uint16,
    torch.float16: types.int16,
    torch.float32: types.float32,
}
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()


@intrinsic
def pointer(typing_context, address, like):
    """Returns an address, int64, as a pointer of the type of `like`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return like(types.int64, like), generate


@intrinsic
def float_pointer(typing_context, address):
    """Returns an address, int64, as a pointer to fp32."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def shifted(typing_context, address, offset):
    """Returns a pointer that is so many elements further on."""

    def generate(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return address(address, types.int64), generate


@njit
def as_float(bits):
    """Returns the fp64 number that an int64 argument of a kernel holds as fp32."""
    return np.float32(np.int64(bits).view(np.float64))


@intrinsic
def _widened(typing_context, bits):
    """Returns the fp16 number of these bits as fp32."""

    def generate(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)

    return types.float32(types.int16), generate


@intrinsic
def _narrowed(typing_context, value):
    """Returns the bits of an fp32 number in fp16, rounded to nearest, ties to even."""

    def generate(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], _HALF), ir.IntType(16))

    return types.int16(types.float32), generate


def load(bits):
    """Returns a stored value as fp32."""


@overload(load, inline="always")
def _load(bits):
    if isinstance(bits, types.Float):
        return lambda bits: bits
    if bits.signed:
        return lambda bits: _widened(bits)
    return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def rounded(value, like):
    """Returns an fp32 value as the array `like` stores it, rounded to nearest, ties to even."""


@overload(rounded)
def _rounded(value, like):
    def to_bf16(value, like):
        bits = np.float32(value).view(np.uint32)
        is_odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        # A NaN stays a NaN: one from bf16, or a new one, has zeros in the 16 bits to drop.
        nearest = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + is_odd))
        return np.uint16(nearest >> np.uint32(16))

    if isinstance(like.dtype, types.Float):
        return lambda value, like: value
    return (lambda value, like: _narrowed(np.float32(value))) if like.dtype.signed else to_bf16


# exp(x) = 2^n * e^r, |r| <= log(2) / 2, and e^r by a polynomial (S. Moshier, Cephes, expf).
@njit(fastmath={"contract"}, error_model="numpy")
def exp(x):
    """Computes e^x in fp32 within 2 units in the last place; LLVM can vectorise it, unlike expf.

    Subnormal results are 0.
    """
    clamped = min(max(x, np.float32(-87.3)), np.float32(88.3))
    n = np.floor(clamped * np.float32(1.44269504088896341) + np.float32(0.5))
    r = clamped - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    result = np.float32(p * power)
    result = np.float32(0) if x < np.float32(-87.3) else result
    result = np.float32(np.inf) if x > np.float32(88.7) else result
    return result if x == x else x
