"""Kernels for CPUs, compiled by numba: each does in one pass, on one thread, what takes torch
many small operations, whose overhead exceeds their arithmetic.

They take bf16 and fp32 and round at the same points as the torch layers. Numba has no bf16, so its
bits are held in uint16. Loops go over rows of two-dimensional arrays, and write either to the array
that they read or to one that does not overlap it, because LLVM vectorises only such loops.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from numba.extending import overload

MAX_ELEMENTS, MAX_THREADS = 1 << 17, 2  # torch may be faster above both limits
STORAGE = {torch.bfloat16: types.uint16, torch.float32: types.float32}
VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def _load(bits):
    """Returns a stored value as fp32."""


@overload(_load)
def _load_overload(bits):
    if isinstance(bits, types.Float):
        return lambda bits: bits
    return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _rounded(value, like):
    """Returns an fp32 value as the array `like` stores it, rounded to nearest, ties to even."""


@overload(_rounded)
def _rounded_overload(value, like):
    def to_bf16(value, like):
        bits = np.float32(value).view(np.uint32)
        is_odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        # A NaN stays a NaN: one from bf16, or a new one, has zeros in the 16 bits to drop.
        nearest = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + is_odd))
        return np.uint16(nearest >> np.uint32(16))

    return (lambda value, like: value) if isinstance(like.dtype, types.Float) else to_bf16


# Sums are vectorised only if they may be reordered; as in torch, 1 / 0 must be infinite.
@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def _normalise(x, i, weight, eps):
    """Replaces row i of x by its RMSNorm, x / rms(x) * weight."""
    size = x.shape[1]
    total = np.float32(0)
    for j in range(size):
        value = _load(x[i, j])
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for j in range(size):
        normed = _load(_rounded(_load(x[i, j]) * scale, x))
        x[i, j] = _rounded(normed * _load(weight[j]), x)


def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, num_tokens, size, eps):
    x = carray(x_ptr, (num_tokens, size))
    residual = carray(residual_ptr, (num_tokens, size))
    weight = carray(weight_ptr, (size,))
    for i in range(num_tokens):
        for j in range(size):
            total = _rounded(_load(x[i, j]) + _load(residual[i, j]), x)
            residual[i, j] = total
            x[i, j] = total
        _normalise(x, i, weight, eps)


@njit(fastmath={"contract"})
def _rotate(x, i, cos_sin, position):
    """Rotates row i of x, which is one head, by the angles of `position`, as RoPE does."""
    half = x.shape[1] // 2
    for j in range(half):
        cos, sin = cos_sin[position, j], cos_sin[position, half + j]
        a, b = _load(x[i, j]), _load(x[i, half + j])
        x[i, j] = _rounded(a * cos - b * sin, x)
        x[i, half + j] = _rounded(b * cos + a * sin, x)


@njit
def _copy(x, i, out, k):
    """Copies row i of x to row k of `out`."""
    for j in range(x.shape[1]):
        out[k, j] = x[i, j]


def _norm_rope_store(
    qkv_ptr,  # [t * (heads + 2 * kv_heads), head_dim], q and k are replaced
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,  # [max_position, head_dim], cos | sin
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,  # [slots * kv_heads, head_dim]
    v_cache_ptr,
    num_tokens,
    heads,
    kv_heads,
    head_dim,
    max_position,
    num_slots,
    has_norm,
    eps,
):
    qkv = carray(qkv_ptr, (num_tokens * (heads + 2 * kv_heads), head_dim))
    positions, slots = carray(positions_ptr, (num_tokens,)), carray(slots_ptr, (num_tokens,))
    cos_sin = carray(cos_sin_ptr, (max_position, head_dim))
    q_weight, k_weight = carray(q_weight_ptr, (head_dim,)), carray(k_weight_ptr, (head_dim,))
    k_cache = carray(k_cache_ptr, (num_slots * kv_heads, head_dim))
    v_cache = carray(v_cache_ptr, (num_slots * kv_heads, head_dim))
    for token in range(num_tokens):
        q = token * (heads + 2 * kv_heads)
        k = q + heads
        v = k + kv_heads
        slot = slots[token] * kv_heads
        for i in range(q, v):
            if has_norm:
                _normalise(qkv, i, q_weight if i < k else k_weight, eps)
            _rotate(qkv, i, cos_sin, positions[token])
        if slot < 0:
            continue
        for head in range(kv_heads):
            _copy(qkv, k + head, k_cache, slot + head)
            _copy(qkv, v + head, v_cache, slot + head)


def _arguments(dtype: torch.dtype) -> dict[Any, list[Any]]:
    """Returns the numba types of each kernel's arguments."""
    data, index, angles = (
        types.CPointer(kind) for kind in (STORAGE[dtype], types.int64, types.float32)
    )
    size = flag = types.int64
    return {
        _add_rms_norm: [data] * 3 + [size] * 2 + [types.float32],
        _norm_rope_store: [data, index, index, angles, data, data, data, data]
        + [size] * 6
        + [flag, types.float32],
    }


@functools.cache
def _compiled(kernel: FunctionType, dtype: torch.dtype) -> Callable[..., None]:
    """Compiles a kernel and returns it as a C function of addresses and numbers.

    Compilation takes seconds, so the result is cached on disk as well.
    """
    arguments = _arguments(dtype)[kernel]
    # Numba neither locks its cache files nor checks their contents. It names them after the
    # function, so a name per dtype and version of this file gives each its own files.
    renamed = FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__)
    renamed.__qualname__ = f"{kernel.__name__}_{dtype}_{VERSION}"
    try:
        compiled = cfunc(types.void(*arguments), cache=True)(renamed)
    except Exception:  # no writable folder, a full disk or a damaged file: do without
        compiled = cfunc(types.void(*arguments))(renamed)
    in_c = {types.int64: ctypes.c_int64, types.float32: ctypes.c_float}
    in_c_or_address: list[Any] = [in_c.get(kind, ctypes.c_void_p) for kind in arguments]
    function = ctypes.CFUNCTYPE(None, *in_c_or_address)(compiled.address)
    vars(function)["owner"] = compiled  # keeps the code at that address alive
    return function


def compile_kernels(dtype: torch.dtype) -> None:
    """Compiles all kernels for `dtype`, torch.bfloat16 or torch.float32."""
    for kernel in _arguments(dtype):
        _compiled(kernel, dtype)


def is_faster(num_elements: int) -> bool:
    """Returns whether the kernels beat torch on a tensor of `num_elements`."""
    return num_elements <= MAX_ELEMENTS or torch.get_num_threads() <= MAX_THREADS


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Replaces x by norm(x + residual) and residual by x + residual, [t, size] each."""
    num_tokens, size = x.shape
    _check(x, residual, weight)
    assert residual.shape == x.shape
    assert weight.shape == (size,)
    _compiled(_add_rms_norm, x.dtype)(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_tokens, size, eps
    )


def norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Does what `norm_rope_store` of kernels/qkv.py does, with the same arguments."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    weights = norm_weights or ()
    _check(qkv, k_cache, v_cache, *weights)
    _check(positions, slot_mapping)
    _check(cos_sin)
    assert positions.dtype == torch.int64
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert all(size == head_dim for size in (*map(len, weights), cos_sin.shape[1]))
    q_weight, k_weight = [weight.data_ptr() for weight in weights] or (None, None)
    _compiled(_norm_rope_store, qkv.dtype)(
        qkv.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        cos_sin.data_ptr(),
        q_weight,
        k_weight,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        num_tokens,
        num_all_heads - 2 * kv_heads,
        kv_heads,
        head_dim,
        len(cos_sin),
        num_blocks * block_size,
        norm_weights is not None,
        eps,
    )


def _check(*tensors: torch.Tensor) -> None:
    """Asserts what the kernels rely on: the tensors are contiguous and share one dtype."""
    assert all(tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors)
