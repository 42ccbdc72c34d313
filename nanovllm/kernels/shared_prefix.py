"""Decode attention to keys that several sequences share, read once for all of them.

One program attends from the queries of an item's members, for all query heads that share a K/V
head, to the item's part of the shared keys. Its results are partial: decode attention merges them
with what each sequence alone holds, weighted by their log-sum-exps (cascade attention; Hydragen,
arXiv:2402.05099).
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import has_dependent_launch, let_next_start
from nanovllm.kernels.kv_format import fitted_queries, load_scales, widened
from nanovllm.kernels.tiles import attention_tile
from nanovllm.utils.context import SharedPrefixes

QUERIES = 64  # queries of a program: an item's members times the heads of a group
PROGRAMS = 512  # so many keep an H200 busy; more only make more partial results


def members_per_item(group: int) -> int:
    """Returns how many sequences an item has room for, with `group` query heads per K/V head."""
    return max(1, QUERIES // group)


def enough_items(kv_heads: int) -> int:
    """Returns from how many items on the parts of shared prefixes need not be made smaller."""
    return max(1, PROGRAMS // kv_heads)


@triton.jit(do_not_specialize=["table_stride"])
def _prefix_kernel(
    q_ptr,  # [n, heads, head_dim], sequences q_stride apart
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    v_cache_ptr,
    kv_scales_ptr,  # int32 [num_blocks, KV_HEADS, BLOCK_SIZE], with K and V in 8 bits
    block_tables_ptr,
    items_ptr,  # [items, 5]: see SharedPrefixes
    members_ptr,
    out_ptr,  # fp32 [items * MEMBERS, heads, head_dim]
    lse_ptr,  # fp32 [items * MEMBERS, heads], base 2
    scale,
    q_stride,
    table_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # MEMBERS * GROUP, padded
    MEMBERS: tl.constexpr,  # members that an item has room for
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,  # HEAD_DIM, padded
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    IS_ON_GPU: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    let_next_start(HAS_PDL)  # decode attention, on what each sequence alone holds
    num_members = tl.load(items_ptr + item * 5 + 1)
    if num_members == 0:
        return
    first_member = tl.load(items_ptr + item * 5)
    row = tl.load(items_ptr + item * 5 + 2).to(tl.int64)
    start = tl.load(items_ptr + item * 5 + 3)
    end = tl.load(items_ptr + item * 5 + 4)

    query = tl.arange(0, QUERIES)
    d = tl.arange(0, D)
    member = query // GROUP
    is_query = member < num_members
    is_d = d < HEAD_DIM
    q_mask = is_query[:, None] & is_d[None, :]
    seq = tl.load(members_ptr + first_member + member, mask=is_query, other=0).to(tl.int64)
    head = kv_head * GROUP + query % GROUP
    q_offset = seq * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=q_mask, other=0.0)

    table_ptr = block_tables_ptr + row * table_stride
    scale_log2 = scale * 1.4426950408889634
    if IS_QUANTISED:
        q, q_scale = fitted_queries(q, scale_log2)
    running_max = tl.full([QUERIES], -1e30, tl.float32)
    running_sum = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, D], tl.float32)
    for tile_start in range(start, end, TILE):
        position = tile_start + tl.arange(0, TILE)
        is_key = position < end
        if BLOCK_SIZE % TILE == 0:  # a tile lies in one block
            block_id = tl.load(table_ptr + tile_start // BLOCK_SIZE).to(tl.int64)
            slot = block_id * BLOCK_SIZE + tile_start % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            block_id = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_key, other=0)
            slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = (slot * KV_HEADS + kv_head) * HEAD_DIM
        kv_mask = is_key[:, None] & is_d[None, :]
        if IS_QUANTISED:
            k_codes = tl.load(k_cache_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0)
            k = widened(k_codes, q.dtype, IS_ON_GPU, True)
            pair = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
            k_scale, v_log2, v_inverse = load_scales(kv_scales_ptr, pair, is_key)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = scores * q_scale[:, None] * k_scale[None, :] + v_log2[None, :]
        else:
            k = tl.load(k_cache_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(running_max - new_max)
        p = weights * v_inverse[None, :] if IS_QUANTISED else weights
        running_sum = running_sum * correction + tl.sum(p, 1)
        if IS_QUANTISED:
            v_codes = tl.load(v_cache_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0)
            v = widened(v_codes, q.dtype, IS_ON_GPU, False)
        else:
            v = tl.load(v_cache_ptr + offset[:, None] + d[None, :], mask=kv_mask, other=0.0)
        pv = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        acc = acc * correction[:, None] + pv
        running_max = new_max

    part = (item * MEMBERS + member) * KV_HEADS * GROUP + head
    out = acc / running_sum[:, None]
    tl.store(out_ptr + part[:, None] * HEAD_DIM + d[None, :], out, mask=q_mask)
    tl.store(lse_ptr + part, running_max + tl.log2(running_sum), mask=is_query)


def attend_to_prefixes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    prefixes: SharedPrefixes,
    scale: float,
    kv_scale_pairs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends from each member of an item to the item's keys.

    q [n, heads, head_dim] (sequences may be strided), caches [num_blocks, block_size, kv_heads,
    head_dim], block_tables int32 [n, width] -> partial results fp32 [max_items * members per item,
    heads, head_dim] and their base-2 log-sum-exps [max_items * members per item, heads]. Partial
    results without a member hold garbage. kv_scale_pairs: `scale_pairs` of caches of uint8 codes.
    """
    _, num_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group = num_heads // kv_heads
    members, max_items = members_per_item(group), len(prefixes.items)
    padded = triton.next_power_of_2(head_dim)
    itemsize = q.element_size()
    is_wide = padded * itemsize > 512  # fp32 heads of 256: only small tiles fit
    out = q.new_empty(max_items * members, num_heads, head_dim, dtype=torch.float32)
    lse = q.new_empty(max_items * members, num_heads, dtype=torch.float32)
    _prefix_kernel[(kv_heads, max_items)](
        q,
        k_cache,
        v_cache,
        kv_scale_pairs,
        block_tables,
        prefixes.items,
        prefixes.members,
        out,
        lse,
        scale,
        q.stride(0),
        block_tables.stride(0),
        GROUP=group,
        QUERIES=triton.next_power_of_2(max(QUERIES, group)),
        MEMBERS=members,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        D=padded,
        BLOCK_SIZE=block_size,
        TILE=attention_tile(padded, itemsize),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        IS_QUANTISED=kv_scale_pairs is not None,
        IS_ON_GPU=q.is_cuda,
        HAS_PDL=has_dependent_launch(q.device),  # but is launched without, since it needs q
        num_warps=4,
        num_stages=2 if is_wide else 4,
    )
    return out, lse
