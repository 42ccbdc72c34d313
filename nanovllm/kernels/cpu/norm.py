"""RMSNorm with the residual add, and all that is done to the heads of q, k and v before attention.

They round at the same points as the torch layers. Loops go over rows of two-dimensional arrays, and
write either to the array that they read or to one that does not overlap it, because LLVM vectorises
only such loops.
"""

import struct

import numpy as np
import torch
from numba import carray, njit

from nanovllm.kernels.cpu.compile import address_of
from nanovllm.kernels.cpu.storage import as_float, float_pointer, load, pointer, rounded
from nanovllm.kernels.cpu.threads import rows_per_chunk, run


# Sums are vectorised only if they may be reordered; as in torch, 1 / 0 must be infinite.
@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def _normalise(x, i, weight, eps):
    """Replaces row i of x by its RMSNorm, x / rms(x) * weight."""
    size = x.shape[1]
    total = np.float32(0)
    for j in range(size):
        value = load(x[i, j])
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for j in range(size):
        normed = load(rounded(load(x[i, j]) * scale, x))
        x[i, j] = rounded(normed * load(weight[j]), x)


def _add_rms_norm(arguments, x_like, data_like, chunk):
    num_tokens, size = arguments[3], arguments[4]
    x = carray(pointer(arguments[0], x_like), (num_tokens, size))
    residual = carray(pointer(arguments[1], x_like), (num_tokens, size))
    weight = carray(pointer(arguments[2], x_like), (size,))
    first = chunk * arguments[5]
    for i in range(first, min(first + arguments[5], num_tokens)):
        for j in range(size):
            total = rounded(load(x[i, j]) + load(residual[i, j]), x)
            residual[i, j] = total
            x[i, j] = total
        _normalise(x, i, weight, as_float(arguments[6]))


@njit(fastmath={"contract"})
def _rotate(x, i, cos_sin, position):
    """Rotates row i of x, which is one head, by the angles of `position`, as RoPE does."""
    half = x.shape[1] // 2
    for j in range(half):
        cos, sin = cos_sin[position, j], cos_sin[position, half + j]
        a, b = load(x[i, j]), load(x[i, half + j])
        x[i, j] = rounded(a * cos - b * sin, x)
        x[i, half + j] = rounded(b * cos + a * sin, x)


@njit
def _store(x, i, cache, k):
    """Copies row i of x to row k of `cache`, and rounds row i as the cache rounds it.

    So attention to a step's own keys and attention to cached ones give the same.
    """
    for j in range(x.shape[1]):
        stored = rounded(load(x[i, j]), cache)
        cache[k, j] = stored
        x[i, j] = rounded(load(stored), x)


def _norm_rope_store(arguments, x_like, data_like, chunk):
    num_tokens, heads, kv_heads, head_dim = arguments[8], arguments[9], arguments[10], arguments[11]
    num_slots, num_positions = arguments[12], arguments[13]
    qkv = carray(pointer(arguments[0], x_like), (num_tokens * (heads + 2 * kv_heads), head_dim))
    positions = carray(pointer(arguments[1], arguments), (num_tokens,))
    slots = carray(pointer(arguments[2], arguments), (num_tokens,))
    cos_sin = carray(float_pointer(arguments[3]), (num_positions, head_dim))
    q_weight = carray(pointer(arguments[4], x_like), (head_dim,))
    k_weight = carray(pointer(arguments[5], x_like), (head_dim,))
    k_cache = carray(pointer(arguments[6], data_like), (num_slots * kv_heads, head_dim))
    v_cache = carray(pointer(arguments[7], data_like), (num_slots * kv_heads, head_dim))
    first = chunk * arguments[14]
    for token in range(first, min(first + arguments[14], num_tokens)):
        q = token * (heads + 2 * kv_heads)
        k = q + heads
        v = k + kv_heads
        slot = slots[token] * kv_heads
        for i in range(q, v):
            if arguments[4]:
                _normalise(qkv, i, q_weight if i < k else k_weight, as_float(arguments[15]))
            _rotate(qkv, i, cos_sin, positions[token])
        if slot < 0:
            continue
        for head in range(kv_heads):
            _store(qkv, k + head, k_cache, slot + head)
            _store(qkv, v + head, v_cache, slot + head)


_pack_norm = struct.Struct("6qd").pack
_pack_rope = struct.Struct("15qd").pack


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Replaces x by norm(x + residual) and residual by x + residual, [t, size] each."""
    num_tokens, size = x.shape
    _check(x, residual, weight)
    assert residual.shape == x.shape
    assert weight.shape == (size,)
    rows = rows_per_chunk(x)
    arguments = _pack_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_tokens, size, rows, eps
    )
    run(address_of(_add_rms_norm, x.dtype, x.dtype), arguments, -(-num_tokens // rows))


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
    """Does what `norm_rope_store` of kernels/qkv.py does, with the same arguments.

    K and V are rounded to the cache's dtype in `qkv` as well, where they are stored.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    weights = norm_weights or ()
    _check(qkv, *weights)
    _check(k_cache, v_cache)
    _check(positions, slot_mapping)
    _check(cos_sin)
    assert positions.dtype == torch.int64
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert all(size == head_dim for size in (*map(len, weights), cos_sin.shape[1]))
    rows = rows_per_chunk(qkv)
    arguments = _pack_rope(
        qkv.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        cos_sin.data_ptr(),
        *([weight.data_ptr() for weight in weights] or [0, 0]),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        num_tokens,
        num_all_heads - 2 * kv_heads,
        kv_heads,
        head_dim,
        num_blocks * block_size,
        len(cos_sin),
        rows,
        eps,
    )
    run(address_of(_norm_rope_store, qkv.dtype, k_cache.dtype), arguments, -(-num_tokens // rows))


def _check(*tensors: torch.Tensor) -> None:
    """Asserts what the kernels rely on: the tensors are contiguous and share one dtype."""
    assert all(tensor.is_contiguous() and tensor.dtype == tensors[0].dtype for tensor in tensors)
