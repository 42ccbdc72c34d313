"""Causal attention of many tokens of a sequence over the paged K/V cache, by tiles of matmul.py.

A sequence's keys and values are packed first, as weights are: in panels of WIDTH keys for
q K^T, and of WIDTH features for the product of the probabilities and V. Then each part of the work
takes a few tokens and the query heads of one K/V head. Scores stay in the cache of a core.
"""

import struct
from dataclasses import dataclass

import numpy as np
import torch
from numba import carray, njit

from nanovllm.kernels.cpu.attention import softmax
from nanovllm.kernels.cpu.compile import address_of
from nanovllm.kernels.cpu.matmul import MAX_TILE_TOKENS, WIDTH, multiply_tile
from nanovllm.kernels.cpu.storage import as_float, float_pointer, load, pointer, shifted
from nanovllm.kernels.cpu.threads import run

KEYS_PER_CHUNK = 4 * WIDTH
ROWS_PER_CHUNK = 4 * MAX_TILE_TOKENS  # tokens times query heads


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What a step's layers have in common.

    keys: int64 [m, 5], parts of the packing: sequence, first key, number of keys, and the
        sequence's first panel and number of panels in `packed`.
    queries: int64 [m, 5], parts of the attention: first token, number of tokens, the first token's
        number of keys, and the sequence's panels as above.
    tables: int64 [n, width], the blocks of the sequences.
    packed: fp32, room for the packed keys and values of all sequences in one layer.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    tables: torch.Tensor
    packed: torch.Tensor
    num_panels: int


def plan_prefill(
    starts: list[int], lens: list[int], tables: torch.Tensor, group: int, kv_shape: tuple[int, int]
) -> PrefillPlan:
    """Divides the work of a step.

    starts: the first token of each sequence, and the number of all tokens. lens: the number of each
    sequence's keys, the step's included. group: query heads per K/V head. kv_shape: K/V heads, and
    their size.
    """
    keys, queries, panel = [], [], 0
    step = max(ROWS_PER_CHUNK // group, 1)
    for seq, length in enumerate(lens):
        num_panels = -(-length // WIDTH)
        for key in range(0, length, KEYS_PER_CHUNK):
            keys.append((seq, key, min(KEYS_PER_CHUNK, length - key), panel, num_panels))
        first, end = starts[seq], starts[seq + 1]
        for token in range(first, end, step):
            num_keys = length - (end - token) + 1
            queries.append((token, min(step, end - token), num_keys, panel, num_panels))
        panel += num_panels
    kv_heads, head_dim = kv_shape
    size = panel * WIDTH * kv_heads * (head_dim + _padded(head_dim))
    return PrefillPlan(
        torch.tensor(keys),
        torch.tensor(queries),
        tables,
        torch.empty(size, dtype=torch.float32),
        panel,
    )


def _padded(head_dim: int) -> int:
    return -(-head_dim // WIDTH) * WIDTH


def _pack_kv(arguments, x_like, data_like, chunk):
    kv_heads, head_dim, num_slots, block_size = (
        arguments[5],
        arguments[6],
        arguments[7],
        arguments[8],
    )
    total, width = arguments[9], arguments[10]
    head, part = chunk % kv_heads, chunk // kv_heads
    parts = carray(pointer(arguments[0], arguments), (part + 1, 5))
    seq, first, count = parts[part, 0], parts[part, 1], parts[part, 2]
    panel, num_panels = parts[part, 3], parts[part, 4]
    table = carray(pointer(arguments[1], arguments), (seq + 1, width))[seq]
    keys = carray(pointer(arguments[2], data_like), (num_slots * kv_heads, head_dim))
    values = carray(pointer(arguments[3], data_like), (num_slots * kv_heads, head_dim))
    num_features = (head_dim + WIDTH - 1) // WIDTH
    # [panels of keys, head_dim, WIDTH], and behind those of all heads [features, keys, WIDTH]
    start = (head * total + panel) * head_dim * WIDTH
    packed_k = carray(shifted(float_pointer(arguments[4]), start), (num_panels, head_dim, WIDTH))
    start = total * kv_heads * head_dim * WIDTH
    start += (head * total + panel) * WIDTH * num_features * WIDTH
    packed_v = carray(
        shifted(float_pointer(arguments[4]), start), (num_features, num_panels * WIDTH, WIDTH)
    )
    for key in range(first, first + (count + WIDTH - 1) // WIDTH * WIDTH):
        if key < first + count:
            slot = table[key // block_size] * block_size + key % block_size
            row = slot * kv_heads + head
            for j in range(head_dim):
                packed_k[key // WIDTH, j, key % WIDTH] = load(keys[row, j])
            for j in range(head_dim):
                packed_v[j // WIDTH, key, j % WIDTH] = load(values[row, j])
        else:  # the rest of the last panel, whose scores nobody reads
            for j in range(head_dim):
                packed_k[key // WIDTH, j, key % WIDTH] = np.float32(0)


@njit
def _multiply(x, rows, weight, panel_size, size, out, n):
    """out [rows, n] = x [rows, size] times a packed weight, whose panels lie `panel_size` apart."""
    num_tiles = (rows + MAX_TILE_TOKENS - 1) // MAX_TILE_TOKENS
    no_bias = float_pointer(0)
    for start in range(0, n, WIDTH):
        panel = shifted(weight, start // WIDTH * panel_size)
        for i in range(num_tiles):
            row = rows * i // num_tiles
            count = rows * (i + 1) // num_tiles - row
            x_row, out_row = shifted(x, row * size), shifted(out, row * n + start)
            multiply_tile(x_row, panel, no_bias, size, out_row, n, n - start, count, 1)


def _attend_many(arguments, x_like, data_like, chunk):
    q_heads, heads, kv_heads, head_dim = arguments[4], arguments[5], arguments[6], arguments[7]
    total, num_tokens, scale = arguments[8], arguments[9], as_float(arguments[10])
    head, part = chunk % kv_heads, chunk // kv_heads
    parts = carray(pointer(arguments[0], arguments), (part + 1, 5))
    first, count, first_keys = parts[part, 0], parts[part, 1], parts[part, 2]
    panel, num_panels = parts[part, 3], parts[part, 4]
    q = carray(float_pointer(arguments[1]), (num_tokens * q_heads, head_dim))
    out = carray(float_pointer(arguments[2]), (num_tokens * heads, head_dim))
    group = heads // kv_heads
    rows, num_keys = count * group, first_keys + count - 1
    # One array, which is used to the end, so that it lives as long as the pointers to it.
    scratch = np.empty(rows * (2 * head_dim + num_keys), np.float32)
    address = np.int64(scratch.ctypes.data)
    queries_at, totals_at = float_pointer(address), float_pointer(address + 4 * rows * head_dim)
    scores_at = float_pointer(address + 8 * rows * head_dim)
    queries = carray(queries_at, (rows, head_dim))
    scores = carray(scores_at, (rows, num_keys))
    for i in range(rows):
        row = (first + i // group) * q_heads + head * group + i % group
        for j in range(head_dim):
            queries[i, j] = q[row, j] * scale
    packed = float_pointer(arguments[3])
    panels = shifted(packed, (head * total + panel) * head_dim * WIDTH)
    _multiply(queries_at, rows, panels, head_dim * WIDTH, head_dim, scores_at, num_keys)
    num_features = (head_dim + WIDTH - 1) // WIDTH
    start = total * kv_heads * head_dim * WIDTH
    panels = shifted(packed, start + (head * total + panel) * WIDTH * num_features * WIDTH)
    for i in range(rows):
        length = first_keys + i // group
        scaled = softmax(scores, i, length)
        for j in range(length):
            scores[i, j] *= scaled
        for j in range(length, num_keys):
            scores[i, j] = np.float32(0)
    panel_size = num_panels * WIDTH * WIDTH
    _multiply(scores_at, rows, panels, panel_size, num_keys, totals_at, head_dim)
    for i in range(rows):
        row = (first + i // group) * heads + head * group + i % group
        for j in range(head_dim):
            out[row, j] = scratch[rows * head_dim + i * head_dim + j]


_pack_pack_arguments = struct.Struct("11q").pack
_pack_attend_arguments = struct.Struct("10qd").pack


def attend_many(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, plan: PrefillPlan
) -> torch.Tensor:
    """Attends the tokens of a prefill: q fp32 [t, heads, head_dim], its heads contiguous; k_cache
    and v_cache [num_blocks, block_size, kv_heads, head_dim] -> [t, heads, head_dim]"""
    num_tokens, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    assert q.dtype == torch.float32
    assert q.stride()[1:] == (head_dim, 1)
    assert q.stride(0) % head_dim == 0
    assert all(x.is_contiguous() for x in (k_cache, v_cache, plan.tables))
    out = q.new_empty(q.shape)
    sources = plan.keys, plan.tables, k_cache, v_cache, plan.packed
    arguments = _pack_pack_arguments(
        *(tensor.data_ptr() for tensor in sources),
        kv_heads,
        head_dim,
        num_blocks * block_size,
        block_size,
        plan.num_panels,
        plan.tables.shape[1],
    )
    run(address_of(_pack_kv, q.dtype, k_cache.dtype), arguments, len(plan.keys) * kv_heads)
    arguments = _pack_attend_arguments(
        *(tensor.data_ptr() for tensor in (plan.queries, q, out, plan.packed)),
        q.stride(0) // head_dim,
        heads,
        kv_heads,
        head_dim,
        plan.num_panels,
        num_tokens,
        scale,
    )
    run(address_of(_attend_many, q.dtype, q.dtype), arguments, len(plan.queries) * kv_heads)
    return out
