"""Causal attention of many new tokens per sequence, over a paged cache or the step's own K/V.

One program attends from one tile of a sequence's new tokens, for all query heads that share a K/V
head, with an online softmax (FlashAttention-2, arXiv:2307.08691). The last new token is aligned
with the last key, so cached prefixes and chunks need no special case.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.tiles import attention_tile

QUERIES = 64  # queries of a program: its tokens times the heads of a group


@triton.jit
def _attend_tile(
    q, acc, running_sum, running_max,
    k_ptr, v_ptr, table_ptr, first_key, position_q,
    tile_start, len_k, scale_log2, kv_head, kv_stride,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    IS_PAGED: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one step of the online softmax, over the keys [tile_start, tile_start + TILE).

    Returns the new (acc, running_sum, running_max).
    """
    position = tile_start + tl.arange(0, TILE)
    d = tl.arange(0, D)
    is_key = position < len_k
    if IS_PAGED:
        if BLOCK_SIZE >= TILE:
            block_id = tl.load(table_ptr + tile_start // BLOCK_SIZE).to(tl.int64)
            slot = block_id * BLOCK_SIZE + tile_start % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            block_id = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_key, other=0)
            slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    else:
        slot = first_key + position
    offset = slot * kv_stride + kv_head * HEAD_DIM
    mask = (d < HEAD_DIM)[None, :] & is_key[:, None]
    k = tl.load(k_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if IS_MASKED:
        is_seen = position[None, :] <= position_q[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    p = tl.exp2(scores - new_max[:, None])
    correction = tl.exp2(running_max - new_max)
    running_sum = running_sum * correction + tl.sum(p, 1)
    v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
    acc = acc * correction[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return acc, running_sum, new_max


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, block_tables_ptr, cu_q_ptr, cu_k_ptr, out_ptr,
    scale, q_stride, kv_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    IS_PAGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tokens: tl.constexpr = QUERIES // GROUP
    kv_head = tl.program_id(0)
    seq = tl.program_id(2)
    first_q = tl.load(cu_q_ptr + seq).to(tl.int64)
    len_q = (tl.load(cu_q_ptr + seq + 1) - first_q).to(tl.int32)
    # The last tile of a sequence sees the most keys, so it starts first.
    tile_q = tl.cdiv(len_q, tokens) - 1 - tl.program_id(1)
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
    full_end = num_seen // TILE * TILE
    last_end = tl.minimum(num_seen + tokens - 1, len_k)

    acc = tl.zeros([QUERIES, D], tl.float32)
    running_sum = tl.zeros([QUERIES], tl.float32)
    running_max = tl.full([QUERIES], -1e30, tl.float32)
    table_ptr = block_tables_ptr + seq * table_stride
    scale_log2 = scale * 1.4426950408889634
    for tile_start in range(0, full_end, TILE):
        acc, running_sum, running_max = _attend_tile(
            q, acc, running_sum, running_max, k_ptr, v_ptr, table_ptr, first_key, position_q,
            tile_start, len_k, scale_log2, kv_head, kv_stride,
            HEAD_DIM, D, BLOCK_SIZE, TILE, IS_PAGED, False, PRECISION,
        )  # fmt: skip
    for tile_start in range(full_end, last_end, TILE):
        acc, running_sum, running_max = _attend_tile(
            q, acc, running_sum, running_max, k_ptr, v_ptr, table_ptr, first_key, position_q,
            tile_start, len_k, scale_log2, kv_head, kv_stride,
            HEAD_DIM, D, BLOCK_SIZE, TILE, IS_PAGED, True, PRECISION,
        )  # fmt: skip
    out_offset = ((first_q + token) * HEADS + head) * HEAD_DIM
    out = (acc / running_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset[:, None] + d[None, :], out, mask=mask)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
) -> torch.Tensor:
    """Attends causally from each sequence's new tokens to all of its tokens.

    q [t, heads, head_dim] -> [t, heads, head_dim]; the tokens of q, k and v may be strided.

    k, v: with block_tables, int32 [n, width], the caches [num_blocks, block_size, kv_heads,
        head_dim]; without, the step's own K/V [t, kv_heads, head_dim].
    cu_seqlens_q, cu_seqlens_k: int32 [n + 1], cumulative new and total tokens per sequence.
    max_seqlen_q: the most new tokens of a sequence.
    """
    num_tokens, num_heads, head_dim = q.shape
    is_paged = block_tables is not None
    tables = block_tables if block_tables is not None else cu_seqlens_q  # then unused
    block_size, kv_heads = (k.shape[1] if is_paged else 1), k.shape[-2]
    padded = triton.next_power_of_2(head_dim)
    tile = min(64, attention_tile(padded, q.element_size()))
    is_wide = padded * q.element_size() > 512  # fp32 heads of 256: only small tiles fit
    queries, stages = (QUERIES // 2, 2) if is_wide else (QUERIES, 3)
    group = num_heads // kv_heads
    queries = max(queries, triton.next_power_of_2(group))
    out = q.new_empty(num_tokens, num_heads, head_dim)
    grid = (kv_heads, triton.cdiv(max_seqlen_q, queries // group), len(cu_seqlens_q) - 1)
    _prefill_kernel[grid](
        q, k, v, tables, cu_seqlens_q, cu_seqlens_k, out,
        scale, q.stride(0), k.stride(-3), tables.stride(0),
        HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, D=padded,
        BLOCK_SIZE=block_size, QUERIES=queries, TILE=tile, IS_PAGED=is_paged,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=stages,
    )  # fmt: skip
    return out
