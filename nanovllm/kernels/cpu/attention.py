"""Causal attention over the paged K/V cache, straight from its blocks: nothing is gathered.

Each token is computed by itself, over as many keys as precede it, so that long contexts in a step
cost the short ones nothing, and results do not depend on the batch.
"""

import struct

import numpy as np
import torch
from numba import carray, njit

from nanovllm.kernels.cpu.compile import address_of
from nanovllm.kernels.cpu.storage import as_float, exp, load, pointer
from nanovllm.kernels.cpu.threads import run


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def _score(q, i, keys, k, scale):
    """Returns the product of row i of q and row k of `keys`, times the scale."""
    total = np.float32(0)
    for j in range(q.shape[1]):
        total += q[i, j] * load(keys[k, j])
    return total * scale


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def softmax(scores, i, length):
    """Replaces a row's first `length` scores by their exponentials; returns one over their sum."""
    largest = scores[i, 0]
    for j in range(length):
        largest = max(largest, scores[i, j])
    total = np.float32(0)
    for j in range(length):
        weight = exp(scores[i, j] - largest)
        scores[i, j] = weight
        total += weight
    return np.float32(1) / total


@njit(fastmath={"contract"})
def _accumulate(total, i, weight, values, k):
    for j in range(total.shape[1]):
        total[i, j] += weight * load(values[k, j])


def _attend(arguments, x_like, data_like, chunk):
    num_tokens, q_heads, heads, kv_heads = arguments[7], arguments[8], arguments[9], arguments[10]
    head_dim, num_slots, block_size = arguments[11], arguments[12], arguments[13]
    num_seqs, width, scale = arguments[14], arguments[15], as_float(arguments[16])
    q = carray(pointer(arguments[0], x_like), (num_tokens * q_heads, head_dim))
    keys = carray(pointer(arguments[1], data_like), (num_slots * kv_heads, head_dim))
    values = carray(pointer(arguments[2], data_like), (num_slots * kv_heads, head_dim))
    out = carray(pointer(arguments[3], x_like), (num_tokens * heads, head_dim))
    tables = carray(pointer(arguments[4], arguments), (num_seqs, width))
    token, kv_head = chunk // kv_heads, chunk % kv_heads
    table = tables[carray(pointer(arguments[5], arguments), (num_tokens,))[token]]
    length = carray(pointer(arguments[6], arguments), (num_tokens,))[token]
    group = heads // kv_heads
    scores = np.empty((group, length), np.float32)
    first_out = token * heads + kv_head * group
    first_q = token * q_heads + kv_head * group
    for start in range(0, length, block_size):
        slot = table[start // block_size] * block_size - start
        for j in range(start, min(start + block_size, length)):
            for i in range(group):
                key = (slot + j) * kv_heads + kv_head
                scores[i, j] = _score(q, first_q + i, keys, key, scale)
    for i in range(group):
        out[first_out + i] = 0
        scaled = softmax(scores, i, length) if length else np.float32(0)
        for start in range(0, length, block_size):
            slot = table[start // block_size] * block_size - start
            for j in range(start, min(start + block_size, length)):
                weight = scores[i, j] * scaled
                _accumulate(out, first_out + i, weight, values, (slot + j) * kv_heads + kv_head)


_pack_arguments = struct.Struct("16qd").pack


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    tables: torch.Tensor,
    seqs: torch.Tensor,
    lens: torch.Tensor,
) -> torch.Tensor:
    """Attends each token to the first keys of its sequence.

    q fp32 [t, heads, head_dim], its heads contiguous; k_cache and v_cache
    [num_blocks, block_size, kv_heads, head_dim]; tables int64 [n, width], the blocks of the
    sequences; seqs and lens int64 [t], each token's sequence and number of keys
    -> [t, heads, head_dim], zeros for a token without keys
    """
    num_tokens, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    assert q.dtype == torch.float32
    assert q.stride()[1:] == (head_dim, 1)
    assert q.stride(0) % head_dim == 0
    assert tables.dtype == seqs.dtype == lens.dtype == torch.int64
    assert all(x.is_contiguous() for x in (k_cache, v_cache, tables, seqs, lens))
    out = q.new_empty(q.shape)
    arguments = _pack_arguments(
        *(tensor.data_ptr() for tensor in (q, k_cache, v_cache, out, tables, seqs, lens)),
        num_tokens,
        q.stride(0) // head_dim,
        heads,
        kv_heads,
        head_dim,
        num_blocks * block_size,
        block_size,
        *tables.shape,
        scale,
    )
    run(address_of(_attend, q.dtype, k_cache.dtype), arguments, num_tokens * kv_heads)
    return out
