"""Paged decode attention with the context split over programs (Flash-Decoding, Dao et al. 2023).

One program attends to one split of one sequence's context, for all query heads that share a K/V
head, with an online softmax, and fetches tiles of K/V ahead. If there is more than one split, a
second kernel merges their results, weighted by their log-sum-exps.

Keys that several sequences share can be read once for all of them, by `attend_to_prefixes`. The
programs then start after them, and merge the results of that kernel into their own.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_launch import decode_config
from nanovllm.kernels.merge_splits import merge_splits
from nanovllm.kernels.shared_prefix import attend_to_prefixes, members_per_item
from nanovllm.kernels.tiles import has_dependent_launch
from nanovllm.utils.context import SharedPrefixes

BLOCKS = 32  # block ids that a program holds at a time


@triton.jit(do_not_specialize=["table_stride", "table_width", "num_splits"])
def _decode_kernel(
    q_ptr,  # [n, heads, head_dim], sequences q_stride apart
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    v_cache_ptr,
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
    MEMBERS: tl.constexpr,  # members per item of a shared prefix, 0 without shared prefixes
    HAS_PDL: tl.constexpr,  # programmatic dependent launch
):
    if IS_SPLIT and HAS_PDL:  # the merge kernel can get ready
        tl.extra.cuda.gdc_launch_dependents()
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

    if MEMBERS:
        if HAS_PDL:  # the kernel that attends to the prefixes may still run
            tl.extra.cuda.gdc_wait()
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
) -> torch.Tensor:
    """Attends from each sequence's one query token to its context.

    q [n, heads, head_dim] (sequences may be strided), caches [num_blocks, block_size, kv_heads,
    head_dim], block_tables int32 [n, width], context_lens int32 [n] (0 gives zeros)
    -> [n, heads, head_dim]

    num_splits: replaces the number of splits that `decode_config` chooses.
    prefixes: what sequences share; the result is the same without it.
    """
    n, num_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    config = decode_config(n * kv_heads, has_prefixes=prefixes is not None)
    splits = num_splits or config.splits
    padded = triton.next_power_of_2(head_dim)
    out = q.new_empty(n, num_heads, head_dim)
    is_split = splits > 1
    partial = q.new_empty(n, num_heads, splits, head_dim, dtype=torch.float32) if is_split else out
    lse = q.new_empty(n, num_heads, splits, dtype=torch.float32) if is_split else out
    group = num_heads // kv_heads
    queries = max(16, triton.next_power_of_2(group))
    tile, stages, num_warps = config.fitted(queries, padded, q)
    has_pdl = has_dependent_launch(q.device)
    members, prefix_out, prefix_lse = 0, out, out
    if prefixes is not None:
        members = members_per_item(group)
        prefix_out, prefix_lse = attend_to_prefixes(
            q, k_cache, v_cache, block_tables, prefixes, scale
        )
    _decode_kernel[(kv_heads, splits, n)](
        q,
        k_cache,
        v_cache,
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
        MEMBERS=members,
        HAS_PDL=has_pdl,
        num_warps=num_warps,
        num_stages=stages,
        **({"launch_pdl": True} if has_pdl and prefixes is not None else {}),
    )
    if is_split:
        merge_splits(partial, lse, out)
    return out
