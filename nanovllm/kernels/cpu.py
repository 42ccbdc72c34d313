"""Kernels for CPUs, compiled by numba: in one pass, on one thread, what torch does in many small
operations, each of which costs more than its arithmetic. For bf16 and fp32; rounds where the torch
layers do. Numba has no bf16: here it is uint16, its bits.

Loops go over rows of two-dimensional arrays, and what is replaced is read from the same array: so
LLVM vectorises them. It does not if arrays that it cannot tell apart overlap.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from numba.extending import overload

MAX_ELEMENTS, MAX_THREADS = 1 << 17, 2  # with more of both torch may be faster
STORAGE = {torch.bfloat16: types.uint16, torch.float32: types.float32}
LANES_MAY_SUM_APART = {"reassoc", "contract"}  # without which sums are not vectorised


def _load(bits):
    """What is stored, as fp32."""


@overload(_load)
def _load_overload(bits):
    if isinstance(bits, types.Float):
        return lambda bits: bits
    return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _rounded(value, like):
    """fp32, rounded to the nearest or else to even, as the array `like` stores it."""


@overload(_rounded)
def _rounded_overload(value, like):
    def to_bf16(value, like):
        bits = np.float32(value).view(np.uint32)
        is_odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        nearest = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + is_odd))
        rounded = np.uint16(nearest >> np.uint32(16))
        return rounded if value == value else np.uint16(0x7FC0)  # NaN

    return (lambda value, like: value) if isinstance(like.dtype, types.Float) else to_bf16


@njit(fastmath=LANES_MAY_SUM_APART)
def _normalise(x, i, weight, eps):
    """Row i <- x / rms(x) * weight."""
    size = x.shape[1]
    total = np.float32(0)
    for j in range(size):
        value = _load(x[i, j])
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for j in range(size):
        normed = _load(_rounded(_load(x[i, j]) * scale, x))
        x[i, j] = _rounded(normed * _load(weight[j]), x)


def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, num_rows, size, eps):
    x = carray(x_ptr, (num_rows, size))
    residual = carray(residual_ptr, (num_rows, size))
    weight = carray(weight_ptr, (size,))
    for i in range(num_rows):
        for j in range(size):
            total = _rounded(_load(x[i, j]) + _load(residual[i, j]), x)
            residual[i, j] = total
            x[i, j] = total
        _normalise(x, i, weight, eps)


@njit(fastmath={"contract"})
def _rotate(x, i, cos_sin, position):
    """Row i, a head, by the angles of its position."""
    half = x.shape[1] // 2
    for j in range(half):
        cos, sin = cos_sin[position, j], cos_sin[position, half + j]
        a, b = _load(x[i, j]), _load(x[i, half + j])
        x[i, j] = _rounded(a * cos - b * sin, x)
        x[i, half + j] = _rounded(b * cos + a * sin, x)


@njit
def _copy(x, i, out, k):
    """Row k of `out` <- row i of x."""
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
        for head in range(kv_heads):
            _copy(qkv, k + head, k_cache, slot + head)
            _copy(qkv, v + head, v_cache, slot + head)


def _arguments(dtype: torch.dtype) -> dict[Callable[..., None], list[Any]]:
    """Of each kernel, in numba's types."""
    data, index, angles = (
        types.CPointer(kind) for kind in (STORAGE[dtype], types.int64, types.float32)
    )
    size, eps = types.int64, types.float32
    return {
        _add_rms_norm: [data] * 3 + [size] * 2 + [eps],
        _norm_rope_store: [data, index, index, angles] + [data] * 4 + [size] * 7 + [eps],
    }


@functools.cache
def _compiled(kernel: Callable[..., None], dtype: torch.dtype) -> Callable[..., None]:
    """The kernel as a C function of addresses and numbers. Kept on disk: it takes seconds."""
    arguments = _arguments(dtype)[kernel]
    try:
        compiled = cfunc(types.void(*arguments), cache=True)(kernel)
    except RuntimeError:  # no folder can be written to
        compiled = cfunc(types.void(*arguments))(kernel)
    in_c = {types.int64: ctypes.c_int64, types.float32: ctypes.c_float}
    in_c_or_address: list[Any] = [in_c.get(kind, ctypes.c_void_p) for kind in arguments]
    return ctypes.CFUNCTYPE(None, *in_c_or_address)(compiled.address)


def compile_kernels(dtype: torch.dtype) -> None:
    """All of them, if it is a dtype that they are for."""
    if dtype in STORAGE:
        for kernel in _arguments(dtype):
            _compiled(kernel, dtype)


def serves(x: torch.Tensor) -> bool:
    """Whether the kernels take `x`, and do so faster than torch."""
    if x.dtype not in STORAGE:
        return False
    return x.numel() <= MAX_ELEMENTS or torch.get_num_threads() <= MAX_THREADS


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x, residual [t, size] <- norm(x + residual), x + residual"""
    num_rows, size = x.shape
    assert all(tensor.is_contiguous() for tensor in (x, residual, weight))
    _compiled(_add_rms_norm, x.dtype)(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_rows, size, eps
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
    """As kernels/qkv.py's, but without padding, as only CUDA graphs have."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    tensors = (qkv, positions, slot_mapping, cos_sin, k_cache, v_cache)
    assert all(tensor.is_contiguous() for tensor in tensors)
    q_weight, k_weight = norm_weights or (qkv, qkv)  # unread
    _compiled(_norm_rope_store, qkv.dtype)(
        qkv.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        cos_sin.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
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
