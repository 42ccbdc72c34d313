"""The work between the QKV projection and attention in one pass: per-head RMSNorm of q and k, RoPE
(arXiv:2104.09864), and the store of k and v into the paged cache. Rounds at the same points as the
torch layers."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import (
    dependent_launch,
    let_next_start,
    wait_for_previous,
)

HEADS_PER_PROGRAM = 8


@triton.jit
def _norm_rope_store_kernel(
    qkv_ptr,  # [t, heads + 2 * kv_heads, head_dim], q and k are replaced
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,  # fp32 [max_position, head_dim], cos | sin
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,  # [slots, kv_heads, head_dim]
    v_cache_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    let_next_start(HAS_PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    j = tl.arange(0, HALF_PADDED)[None, :]
    in_half = j < HALF
    mask = (head < HEADS + 2 * KV_HEADS) & in_half
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS

    # What does not depend on the kernel before is read while that still runs.
    if HAS_NORM:
        wq_a = tl.load(q_weight_ptr + j, mask=in_half, other=0.0).to(tl.float32)
        wq_b = tl.load(q_weight_ptr + HALF + j, mask=in_half, other=0.0).to(tl.float32)
        wk_a = tl.load(k_weight_ptr + j, mask=in_half, other=0.0).to(tl.float32)
        wk_b = tl.load(k_weight_ptr + HALF + j, mask=in_half, other=0.0).to(tl.float32)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF) + j
    cos = tl.load(angle_ptr, mask=in_half, other=0.0)
    sin = tl.load(angle_ptr + HALF, mask=in_half, other=0.0)
    slot = tl.load(slots_ptr + token)

    wait_for_previous(HAS_PDL)
    first_ptr = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + j
    first = tl.load(first_ptr, mask=mask, other=0.0)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0)
    dtype = first.dtype
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = (a * scale).to(dtype).to(tl.float32) * tl.where(is_q, wq_a, wk_a)
        b = (b * scale).to(dtype).to(tl.float32) * tl.where(is_q, wq_b, wk_b)
        a = a.to(dtype).to(tl.float32)
        b = b.to(dtype).to(tl.float32)
    rotated_a = (a * cos - b * sin).to(dtype)
    rotated_b = (b * cos + a * sin).to(dtype)
    tl.store(first_ptr, rotated_a, mask=mask & ~is_v)
    tl.store(first_ptr + HALF, rotated_b, mask=mask & ~is_v)
    if slot >= 0:
        k_ptr = k_cache_ptr + (slot * KV_HEADS + head - HEADS) * (2 * HALF) + j
        is_k = mask & ~is_q & ~is_v
        tl.store(k_ptr, rotated_a, mask=is_k)
        tl.store(k_ptr + HALF, rotated_b, mask=is_k)
        v_ptr = v_cache_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + j
        tl.store(v_ptr, first, mask=mask & is_v)
        tl.store(v_ptr + HALF, second, mask=mask & is_v)


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
    """Normalises and rotates q and k in place, and copies k and v to their slots of the caches.

    qkv: [t, heads + 2 * kv_heads, head_dim].
    positions, slot_mapping: int64 [t]; a token with slot -1 is not stored.
    cos_sin: fp32 [max_position, head_dim], cos | sin.
    norm_weights: of q and k, [head_dim] each, or None for no norm.
    k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim].
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    q_weight, k_weight = norm_weights or (None, None)
    _norm_rope_store_kernel[(num_tokens, triton.cdiv(num_all_heads, HEADS_PER_PROGRAM))](
        qkv,
        positions,
        slot_mapping,
        cos_sin,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        eps,
        HEADS=num_all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=norm_weights is not None,
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        num_warps=4,
        **dependent_launch(qkv.device),
    )
