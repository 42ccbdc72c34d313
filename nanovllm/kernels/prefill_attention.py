"""Causal attention of many new tokens per sequence, over a paged cache or the step's own K/V.

One program attends from one tile of a sequence's new tokens, for all query heads that share a K/V
head, with an online softmax (FlashAttention-2, arXiv:2307.08691). The last new token is aligned
with the last key, so cached prefixes and chunks need no special case. The tiles of all sequences
form one list, which programs look up on the device, so the grid depends on no single length. If
there are few tiles, several programs share the keys of each, and a second kernel merges.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.kv_format import fitted_queries, load_scales, scale_pairs, widened
from nanovllm.kernels.merge_splits import merge_splits
from nanovllm.kernels.prefill_launch import max_tiles, prefill_config

SEQS = 1024  # sequences that a program looks through at a time


@triton.jit
def _find_tile(cu_q_ptr, num_seqs, index, TOKENS: tl.constexpr, SEQS: tl.constexpr):
    """Returns the sequence of the tile at `index` of the list, and its place in the sequence.

    The tiles of sequence s begin at cu_q[s] // TOKENS + s, which leaves room for all tiles of the
    sequences before it, and sometimes for one more: then the place is past the sequence's end.
    """
    num_begun = 0
    for first in range(0, num_seqs, SEQS):
        seq = first + tl.arange(0, SEQS)
        is_seq = seq < num_seqs
        first_tile = tl.load(cu_q_ptr + seq, mask=is_seq, other=0) // TOKENS + seq
        num_begun += tl.sum((is_seq & (first_tile <= index)).to(tl.int32), 0)
    seq = num_begun - 1
    return seq, index - (tl.load(cu_q_ptr + seq) // TOKENS + seq)


@triton.jit
def _block_of(table_ptr, position, BLOCK_SIZE: tl.constexpr, HAS_BLOCK: tl.constexpr):
    """Returns the id of the block of a position; 0 if tiles of keys do not lie in one block."""
    block_id = 0
    if HAS_BLOCK:
        block_id = tl.load(table_ptr + position // BLOCK_SIZE)
    return block_id


@triton.jit
def _attend_tile(
    q, acc, running_sum, running_max,
    k_ptr, v_ptr, kv_scales_ptr, table_ptr, block_id, first_key, position_q,
    tile_start, end, scale_log2, kv_head, kv_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, IS_PAGED: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
    IS_QUANTISED: tl.constexpr, IS_ON_GPU: tl.constexpr,
):  # fmt: skip
    """Takes one step of the online softmax, over the keys [tile_start, tile_start + TILE).

    scale_log2: of the scores; with K and V in 8 bits, of each row of q.
    Returns the new (acc, running_sum, running_max).
    """
    position = tile_start + tl.arange(0, TILE)
    d = tl.arange(0, D)
    if not IS_PAGED:
        slot = first_key + position
    elif BLOCK_SIZE >= TILE:
        first_slot = block_id.to(tl.int64) * BLOCK_SIZE + tile_start % BLOCK_SIZE
        slot = first_slot + tl.arange(0, TILE)
    else:
        block_ids = tl.load(table_ptr + position // BLOCK_SIZE, mask=position < end, other=0)
        slot = block_ids.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    offset = (slot * kv_stride + kv_head * HEAD_DIM)[:, None] + d[None, :]
    mask = None
    if IS_MASKED:  # what the pool holds behind the last token may be NaN
        mask = (position < end)[:, None] & (d < HEAD_DIM)[None, :]
    elif HEAD_DIM < D:
        mask = (d < HEAD_DIM)[None, :]
    if IS_QUANTISED:
        k_codes = tl.load(k_ptr + offset, mask=mask, other=None if mask is None else 0)
        k = widened(k_codes, q.dtype, IS_ON_GPU, True)
        pair = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        k_scale, v_log2, v_inverse = load_scales(kv_scales_ptr, pair, position < end)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = scores * scale_log2[:, None] * k_scale[None, :] + v_log2[None, :]
    else:
        k = tl.load(k_ptr + offset, mask=mask, other=None if mask is None else 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if IS_MASKED:
        is_seen = position[None, :] <= position_q[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    if IS_QUANTISED:
        # A weight is a probability times V's scale, so that it fits fp16.
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        p = weights * v_inverse[None, :]
        v_codes = tl.load(v_ptr + offset, mask=mask, other=None if mask is None else 0)
        v = widened(v_codes, q.dtype, IS_ON_GPU, False)
    else:
        new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        p = weights
        v = tl.load(v_ptr + offset, mask=mask, other=None if mask is None else 0.0)
    correction = tl.exp2(running_max - new_max)
    running_sum = running_sum * correction + tl.sum(p, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
    return acc, running_sum, new_max


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_splits"],
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_q_ptr", "cu_k_ptr"],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr,
    kv_scales_ptr,  # int32 [num_blocks, KV_HEADS, BLOCK_SIZE], with K and V in 8 bits
    block_tables_ptr, cu_q_ptr, cu_k_ptr,
    out_ptr,  # [t, heads, num_splits, head_dim]: results, or fp32 partial results
    lse_ptr,  # [t, heads, num_splits], base 2
    scale, q_stride, kv_stride, table_stride, num_seqs, num_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr,
    IS_PAGED: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    IS_QUANTISED: tl.constexpr, IS_ON_GPU: tl.constexpr,
):  # fmt: skip
    tokens: tl.constexpr = QUERIES // GROUP
    has_block: tl.constexpr = IS_PAGED and BLOCK_SIZE >= TILE  # a tile of keys lies in one block
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    seq, place = _find_tile(cu_q_ptr, num_seqs, tl.program_id(1), tokens, SEQS)
    first_q = tl.load(cu_q_ptr + seq).to(tl.int64)
    len_q = (tl.load(cu_q_ptr + seq + 1) - first_q).to(tl.int32)
    # The last tile of a sequence sees the most keys, so it starts first.
    tile_q = tl.cdiv(len_q, tokens) - 1 - place
    if tile_q < 0:
        return
    first_key = tl.load(cu_k_ptr + seq).to(tl.int64)
    len_k = (tl.load(cu_k_ptr + seq + 1) - first_key).to(tl.int32)

    query = tl.arange(0, QUERIES)
    token = tile_q * tokens + query // GROUP
    head = kv_head * GROUP + query % GROUP
    d = tl.arange(0, D)
    is_query = (query < tokens * GROUP) & (token < len_q)
    mask = is_query[:, None] & (d < HEAD_DIM)[None, :]
    q_offset = (first_q + token) * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
    position_q = len_k - len_q + token
    # All tokens of the tile see the `num_seen` keys of its first token, whose whole tiles need no
    # mask. The tiles after these, up to the key of the last token, do.
    num_seen = len_k - len_q + tile_q * tokens + 1
    start, end = 0, tl.minimum(num_seen + tokens - 1, len_k)
    if IS_SPLIT:
        keys_per_split = tl.cdiv(tl.cdiv(end, TILE), num_splits) * TILE
        start = split * keys_per_split
        end = tl.minimum(start + keys_per_split, end)
    full_end = tl.maximum(tl.minimum(num_seen, end) // TILE * TILE, start)

    acc = tl.zeros([QUERIES, D], tl.float32)
    running_sum = tl.zeros([QUERIES], tl.float32)
    running_max = tl.full([QUERIES], -1e30, tl.float32)  # finite, or an empty split gives NaN
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    scale_log2 = scale * 1.4426950408889634
    if IS_QUANTISED:
        q, scale_log2 = fitted_queries(q, scale_log2)
    # A block id is read one tile ahead: K/V whose address waits for another load would not be
    # fetched several tiles ahead.
    last_key = tl.maximum(end - 1, 0)
    block_id = _block_of(table_ptr, tl.minimum(start, last_key), BLOCK_SIZE, has_block)
    for is_masked in tl.static_range(2):
        first, last = (full_end, end) if is_masked else (start, full_end)
        for tile_start in range(first, last, TILE):
            next_key = tl.minimum(tile_start + TILE, last_key)
            next_block_id = _block_of(table_ptr, next_key, BLOCK_SIZE, has_block)
            acc, running_sum, running_max = _attend_tile(
                q, acc, running_sum, running_max, k_ptr, v_ptr, kv_scales_ptr, table_ptr, block_id,
                first_key, position_q, tile_start, end, scale_log2, kv_head, kv_stride,
                HEADS // GROUP, HEAD_DIM, D, BLOCK_SIZE, TILE, IS_PAGED, is_masked, PRECISION,
                IS_QUANTISED, IS_ON_GPU,
            )  # fmt: skip
            block_id = next_block_id
    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    part = ((first_q + token) * HEADS + head) * num_splits + split
    out_ptrs = out_ptr + part[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    if IS_SPLIT:
        lse = tl.where(running_sum > 0, running_max + tl.log2(running_sum), float("-inf"))
        tl.store(lse_ptr + part, lse, mask=is_query)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends causally from each sequence's new tokens to all of its tokens.

    q [t, heads, head_dim] -> [t, heads, head_dim]; the tokens of q, k and v may be strided. The
    results of tokens after the last sequence's are arbitrary.

    k, v: with block_tables, int32 [n, width], the caches [num_blocks, block_size, kv_heads,
        head_dim]; without, the step's own K/V [t, kv_heads, head_dim].
    cu_seqlens_q, cu_seqlens_k: int32 [n + 1], cumulative new and total tokens per sequence.
    max_seqlen_k: a bound on the total tokens of a sequence. It decides about speed only.
    scale: positive.
    kv_scales: of caches of uint8 codes, bf16 [num_blocks, kv_heads, block_size, 2].
    """
    num_tokens, num_heads, head_dim = q.shape
    is_paged = block_tables is not None
    tables = block_tables if block_tables is not None else cu_seqlens_q  # then unused
    pairs = scale_pairs(kv_scales) if kv_scales is not None else None
    num_seqs, kv_heads = len(cu_seqlens_q) - 1, k.shape[-2]
    config, splits = prefill_config(q, num_seqs, kv_heads, max_seqlen_k, is_paged)
    group = num_heads // kv_heads
    out = q.new_empty(num_tokens, num_heads, head_dim)
    partial, lse = out, out
    if splits > 1:
        partial = q.new_empty(num_tokens, num_heads, splits, head_dim, dtype=torch.float32)
        lse = q.new_empty(num_tokens, num_heads, splits, dtype=torch.float32)
    grid = (kv_heads, max_tiles(num_tokens, num_seqs, config.queries // group), splits)
    _prefill_kernel[grid](
        q, k, v, pairs, tables, cu_seqlens_q, cu_seqlens_k, partial, lse,
        scale, q.stride(0), k.stride(-3), tables.stride(0), num_seqs, splits,
        HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=k.shape[1] if is_paged else 1, QUERIES=config.queries, TILE=config.tile,
        SEQS=SEQS, IS_PAGED=is_paged, IS_SPLIT=splits > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        IS_QUANTISED=kv_scales is not None, IS_ON_GPU=q.is_cuda,
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip
    if splits > 1:
        merge_splits(partial, lse, out)
    return out
