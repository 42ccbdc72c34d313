"""Paged decode attention with the context split over programs (Flash-Decoding, Dao et al. 2023).

One program attends to one split of one sequence's context, for all query heads that share a K/V
head, with an online softmax, and fetches tiles of K/V ahead. If there is more than one split, a
second kernel merges their results, weighted by their log-sum-exps. K and V may be in 8 bits.

Keys that several sequences share can be read once for all of them, by `attend_to_prefixes`. The
programs then start after them, and merge the results of that kernel into their own.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_launch import decode_config
from nanovllm.kernels.decode_step import attend_to_codes
from nanovllm.kernels.dependent_launch import (
    FEW_TOKENS,
    dependent_launch,
    let_next_start,
    prefetch,
    wait_for_previous,
)
from nanovllm.kernels.kv_format import fitted_queries, scale_pairs
from nanovllm.kernels.merge_splits import merge_splits
from nanovllm.kernels.shared_prefix import attend_to_prefixes, members_per_item
from nanovllm.utils.context import SharedPrefixes

BLOCKS = 32  # block ids that a program holds at a time


@triton.jit(do_not_specialize=["table_stride", "table_width", "num_splits"])
def _decode_kernel(
    q_ptr,  # [n, heads, head_dim], sequences q_stride apart
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    v_cache_ptr,
    kv_scales_ptr,  # int32 [num_blocks, KV_HEADS, BLOCK_SIZE], with K and V in 8 bits
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,  # [n, heads, num_splits, head_dim]: results, or fp32 partial results
    lse_ptr,  # [n, heads, num_splits], base 2
    prefix_rows_ptr,  # [n, 3]: see SharedPrefixes
    prefix_out_ptr,  # fp32 [items * MEMBERS, heads, head_dim]
    prefix_lse_ptr,  # fp32 [items * MEMBERS, heads], base 2
    scale,
    q_stride,
    table_stride,
    table_width,
    num_splits,
    GROUP: tl.constexpr,  # query heads per K/V head
    QUERIES: tl.constexpr,  # GROUP, padded for tl.dot
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,  # HEAD_DIM, padded
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,  # at least TILE / BLOCK_SIZE
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    IS_ON_GPU: tl.constexpr,
    LINES: tl.constexpr,  # of 128 bytes in a head, or fewer
    MEMBERS: tl.constexpr,  # members per item of a shared prefix, 0 without shared prefixes
    IS_EARLY: tl.constexpr,  # whether to start the next kernel, and to fetch K/V, at once
    HAS_PDL: tl.constexpr,
):
    if IS_EARLY:
        let_next_start(HAS_PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + seq)
    start, end = 0, context_len
    if MEMBERS:
        start = tl.load(prefix_rows_ptr + seq * 3)
    if IS_SPLIT:
        tiles_per_split = tl.cdiv(tl.cdiv(context_len - start, TILE), num_splits)
        start += split * tiles_per_split * TILE
        end = tl.minimum(start + tiles_per_split * TILE, context_len)
    # Block ids stay in registers: to read one in the inner loop would keep K/V from being fetched
    # several tiles ahead. Where `start` is 0 this read need not wait for the context length.
    block = start // BLOCK_SIZE + tl.arange(0, BLOCKS)
    block_tables_ptr += seq * table_stride
    block_ids = tl.load(block_tables_ptr + block, mask=block < table_width, other=0)

    if not MEMBERS:  # else the kernel of the prefixes has waited for q, k and v
        if IS_EARLY and HAS_PDL:  # the first tile; the kernel before makes its last key at most
            first = tl.minimum(start + tl.arange(0, TILE), tl.maximum(end, 1) - 1)
            first_id = tl.load(block_tables_ptr + first // BLOCK_SIZE, mask=first < end, other=0)
            first_slot = first_id.to(tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE
            line = tl.arange(0, LINES)[None, :] * (HEAD_DIM // LINES)
            line += ((first_slot * KV_HEADS + kv_head) * HEAD_DIM)[:, None]
            prefetch(k_cache_ptr + line)
            prefetch(v_cache_ptr + line)
        wait_for_previous(HAS_PDL)
    query = tl.arange(0, QUERIES)
    d = tl.arange(0, D)
    is_query = query < GROUP
    is_d = d < HEAD_DIM
    q_mask = is_query[:, None] & is_d[None, :]
    q_offset = (kv_head * GROUP + query)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + seq * q_stride + q_offset, mask=q_mask, other=0.0)

    scale_log2 = scale * 1.4426950408889634
    running_max = tl.full([QUERIES], -1e30, tl.float32)  # finite, or an empty split gives NaN
    running_sum = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, D], tl.float32)
    if IS_QUANTISED:
        q, q_scale = fitted_queries(q, scale_log2)
        q, acc = tl.trans(q), tl.trans(acc)
    for first_block in range(start // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE), BLOCKS):
        first_tile = tl.maximum(first_block * BLOCK_SIZE, start)
        last_end = tl.minimum((first_block + BLOCKS) * BLOCK_SIZE, end)
        for tile_start in range(first_tile, last_end, TILE):
            position = tile_start + tl.arange(0, TILE)
            in_context = position < end
            if BLOCK_SIZE >= TILE:  # a tile lies in one block
                is_own = block == tile_start // BLOCK_SIZE
                block_id = tl.sum(tl.where(is_own, block_ids, 0), 0).to(tl.int64)
                slot = block_id * BLOCK_SIZE + tile_start % BLOCK_SIZE + tl.arange(0, TILE)
            else:
                is_own = block[None, :] == (position // BLOCK_SIZE)[:, None]
                block_id = tl.sum(tl.where(is_own, block_ids[None, :], 0), 1).to(tl.int64)
                slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
            if IS_QUANTISED:
                acc, running_sum, running_max = attend_to_codes(
                    q, q_scale, acc, running_sum, running_max,
                    k_cache_ptr, v_cache_ptr, kv_scales_ptr, slot, kv_head, in_context,
                    KV_HEADS, HEAD_DIM, D, BLOCK_SIZE, TILE, PRECISION, IS_ON_GPU,
                )  # fmt: skip
            else:
                offset = (slot * KV_HEADS + kv_head) * HEAD_DIM
                kv_mask = in_context[:, None] & is_d[None, :]
                k = tl.load(k_cache_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
                v = tl.load(v_cache_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
                scores = tl.where(in_context[None, :], scores, float("-inf"))
                new_max = tl.maximum(running_max, tl.max(scores, 1))
                p = tl.exp2(scores - new_max[:, None])
                correction = tl.exp2(running_max - new_max)
                running_sum = running_sum * correction + tl.sum(p, 1)
                pv = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
                acc = acc * correction[:, None] + pv
                running_max = new_max
        block += BLOCKS
        block_ids = tl.load(block_tables_ptr + block, mask=block < table_width, other=0)

    if IS_QUANTISED:
        acc = tl.trans(acc)
    if not IS_EARLY:
        let_next_start(HAS_PDL)
    if MEMBERS:
        wait_for_previous(HAS_PDL)  # the kernel that attends to the prefixes
        first_partial = tl.load(prefix_rows_ptr + seq * 3 + 1).to(tl.int64)
        num_partials = tl.load(prefix_rows_ptr + seq * 3 + 2)
        for i in range(split, num_partials, num_splits):
            partial = first_partial + i * MEMBERS
            part = (partial * KV_HEADS + kv_head) * GROUP + query
            lse = tl.load(prefix_lse_ptr + part, mask=is_query, other=float("-inf"))
            offset = part[:, None] * HEAD_DIM + d[None, :]
            out = tl.load(prefix_out_ptr + offset, mask=q_mask, other=0.0)
            new_max = tl.maximum(running_max, lse)
            weight = tl.exp2(lse - new_max)
            correction = tl.exp2(running_max - new_max)
            running_sum = running_sum * correction + weight
            acc = acc * correction[:, None] + out * weight[:, None]
            running_max = new_max
    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    part = (seq * KV_HEADS * GROUP + kv_head * GROUP + query) * num_splits + split
    tl.store(
        out_ptr + part[:, None] * HEAD_DIM + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=q_mask,
    )
    if IS_SPLIT:
        lse = tl.where(running_sum > 0, running_max + tl.log2(running_sum), float("-inf"))
        tl.store(lse_ptr + part, lse, mask=is_query)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_splits: int | None = None,
    prefixes: SharedPrefixes | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends from each sequence's one query token to its context.

    q [n, heads, head_dim] (sequences may be strided), caches [num_blocks, block_size, kv_heads,
    head_dim], block_tables int32 [n, width], context_lens int32 [n] (0 gives zeros)
    -> [n, heads, head_dim]

    num_splits: replaces the number of splits that `decode_config` chooses.
    prefixes: what sequences share; the result is the same without it.
    kv_scales: of caches of uint8 codes, bf16 [num_blocks, kv_heads, block_size, 2].
    """
    n, num_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    pairs = scale_pairs(kv_scales) if kv_scales is not None else None
    config = decode_config(n * kv_heads, prefixes is not None, k_cache.element_size())
    splits = num_splits or config.splits
    padded = triton.next_power_of_2(head_dim)
    out = q.new_empty(n, num_heads, head_dim)
    is_split = splits > 1
    partial = q.new_empty(n, num_heads, splits, head_dim, dtype=torch.float32) if is_split else out
    lse = q.new_empty(n, num_heads, splits, dtype=torch.float32) if is_split else out
    group = num_heads // kv_heads
    # The least that tl.dot takes: as rows, or as columns of products with K and V in 8 bits.
    queries = max(16 if pairs is None else 8, triton.next_power_of_2(group))
    tile, stages, num_warps = config.fitted(queries, padded, q, k_cache.element_size())
    members, prefix_out, prefix_lse = 0, out, out
    if prefixes is not None:
        members = members_per_item(group)
        prefix_out, prefix_lse = attend_to_prefixes(
            q, k_cache, v_cache, block_tables, prefixes, scale, pairs
        )
    _decode_kernel[(kv_heads, splits, n)](
        q,
        k_cache,
        v_cache,
        pairs,
        block_tables,
        context_lens,
        partial,
        lse,
        prefixes.rows if prefixes is not None else context_lens,
        prefix_out,
        prefix_lse,
        scale,
        q.stride(0),
        block_tables.stride(0),
        block_tables.shape[1],
        splits,
        GROUP=group,
        QUERIES=queries,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        D=padded,
        BLOCK_SIZE=block_size,
        TILE=tile,
        BLOCKS=max(BLOCKS, tile // block_size),
        IS_SPLIT=is_split,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        IS_QUANTISED=pairs is not None,
        IS_ON_GPU=q.is_cuda,
        LINES=max(padded * k_cache.element_size() // 128, 1),
        MEMBERS=members,
        IS_EARLY=n <= FEW_TOKENS,
        num_warps=num_warps,
        num_stages=stages,
        **dependent_launch(q.device),
    )
    if is_split:
        merge_splits(partial, lse, out)
    return out
