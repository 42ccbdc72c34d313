"""The work between the QKV projection and attention in one pass: per-head RMSNorm of q and k, RoPE
(arXiv:2104.09864), and the store of k and v into the paged cache. Rounds at the same points as the
torch layers. With K and V in 8 bits it also rounds k and v as the cache does, so that attention to
a step's own keys and attention to cached ones give the same."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import (
    dependent_launch,
    let_next_start,
    wait_for_previous,
)
from nanovllm.kernels.kv_format import kv_scale, quantised

HEADS_PER_PROGRAM = 8


@triton.jit
def _norm_rope_store_kernel(
    qkv_ptr,  # [t, heads + 2 * kv_heads, head_dim], q and k are replaced, and v if in 8 bits
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,  # fp32 [max_position, head_dim], cos | sin
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,  # [slots, kv_heads, head_dim]
    v_cache_ptr,
    kv_scales_ptr,  # bits of bf16, int16 [num_blocks, kv_heads, BLOCK_SIZE, 2]
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
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
    if IS_QUANTISED:
        kept_a = tl.where(is_v, first, rotated_a).to(tl.float32)
        kept_b = tl.where(is_v, second, rotated_b).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(kept_a), 1), tl.max(tl.abs(kept_b), 1))[:, None]
        kv_scales = tl.where(is_v, kv_scale(largest, True), kv_scale(largest, False))
        inverse = tl.math.div_rn(1.0, kv_scales)
        k_a, integers_a = quantised(kept_a, inverse)
        k_b, integers_b = quantised(kept_b, inverse)
        v_a, v_b = k_a, k_b
        kept_a = tl.where(is_q, rotated_a, (integers_a * kv_scales).to(dtype))
        kept_b = tl.where(is_q, rotated_b, (integers_b * kv_scales).to(dtype))
        tl.store(first_ptr, kept_a, mask=mask)
        tl.store(first_ptr + HALF, kept_b, mask=mask)
    else:
        k_a, k_b, v_a, v_b = rotated_a, rotated_b, first, second
        tl.store(first_ptr, rotated_a, mask=mask & ~is_v)
        tl.store(first_ptr + HALF, rotated_b, mask=mask & ~is_v)
    if slot >= 0:
        k_ptr = k_cache_ptr + (slot * KV_HEADS + head - HEADS) * (2 * HALF) + j
        is_k = mask & ~is_q & ~is_v
        tl.store(k_ptr, k_a, mask=is_k)
        tl.store(k_ptr + HALF, k_b, mask=is_k)
        v_ptr = v_cache_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + j
        tl.store(v_ptr, v_a, mask=mask & is_v)
        tl.store(v_ptr + HALF, v_b, mask=mask & is_v)
        if IS_QUANTISED:
            kv_head = head - HEADS - tl.where(is_v, KV_HEADS, 0)
            pair = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
            scale_ptr = kv_scales_ptr + pair * 2 + tl.where(is_v, 1, 0)
            bits = kv_scales.to(tl.int32, bitcast=True) >> 16
            is_kv_head = ~is_q & (head < HEADS + 2 * KV_HEADS)
            tl.store(scale_ptr, bits.to(tl.int16), mask=is_kv_head)


def norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Normalises and rotates q and k in place, and copies k and v to their slots of the caches.

    qkv: [t, heads + 2 * kv_heads, head_dim].
    positions, slot_mapping: int64 [t]; a token with slot -1 is not stored.
    cos_sin: fp32 [max_position, head_dim], cos | sin.
    norm_weights: of q and k, [head_dim] each, or None for no norm.
    k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim]; uint8 codes with `kv_scales`,
        bf16 [num_blocks, kv_heads, block_size, 2]. Then k and v are rounded in place, too.
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
        kv_scales.view(torch.int16) if kv_scales is not None else None,
        eps,
        HEADS=num_all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=norm_weights is not None,
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        BLOCK_SIZE=k_cache.shape[1],
        IS_QUANTISED=kv_scales is not None,
        num_warps=4,
        **dependent_launch(qkv.device),
    )
