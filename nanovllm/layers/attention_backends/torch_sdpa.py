"""Attention in plain torch over gathered pages: any device, and the oracle of every other backend.

One sequence at a time, no padding, no mask tricks: slow and plainly right.
"""

import torch
import torch.nn.functional as F

from nanovllm.utils.context import Context


class TorchBackend:
    name = "torch"

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        is_stored = slot_mapping >= 0
        slots = slot_mapping[is_stored]
        k_cache.flatten(0, 1)[slots] = k[is_stored]
        v_cache.flatten(0, 1)[slots] = v[is_stored]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        context: Context,
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        lens_k = context.context_lens.tolist()
        starts_q = list(range(len(lens_k) + 1))
        if context.cu_seqlens_q is not None:
            starts_q = context.cu_seqlens_q.tolist()
        for i, len_k in enumerate(lens_k):
            new = slice(starts_q[i], starts_q[i + 1])
            if len_k == 0:
                continue
            if context.block_tables is None:
                keys, values = k[new], v[new]
            else:
                block_ids = context.block_tables[i, : -(-len_k // k_cache.shape[1])]
                keys = k_cache[block_ids].flatten(0, 1)[:len_k]
                values = v_cache[block_ids].flatten(0, 1)[:len_k]
            out[new] = _attend_one(q[new], keys, values, scale)
        return out


def _attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [n, heads, head_dim], the sequence's last n positions; keys and values of all of them,
    [len, kv_heads, head_dim] -> [n, heads, head_dim]"""
    n, num_heads, head_dim = q.shape
    len_k, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    # [kv_heads, group, ...]: the heads that share K/V lie together; K/V is expanded, not copied
    q = q.view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (
        x.transpose(0, 1).unsqueeze(1).expand(num_kv_heads, group, len_k, head_dim)
        for x in (keys, values)
    )
    mask = None
    if 1 < n < len_k:
        mask = torch.ones(n, len_k, dtype=torch.bool, device=q.device).tril(len_k - n)
    is_causal = 1 < n == len_k
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(n, num_heads, head_dim)
