"""Attention in plain torch over gathered pages: any device, and the oracle of every other backend.

One sequence at a time, no padding, no mask tricks: slow and plainly right.
"""

import torch
import torch.nn.functional as F

from nanovllm.utils.context import Context


class TorchBackend:
    name = "torch"

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        context: Context,
    ) -> torch.Tensor:
        assert context.cu_seqlens_q is not None
        starts = context.cu_seqlens_q.tolist()
        out = torch.zeros_like(q)
        for i, len_k in enumerate(context.context_lens.tolist()):
            new = slice(starts[i], starts[i + 1])
            keys, values = k[new], v[new]
            if context.block_tables is not None:
                keys = _gather(k_cache, context.block_tables[i], len_k)
                values = _gather(v_cache, context.block_tables[i], len_k)
            out[new] = _attend(q[new], keys, values, scale)
        return out

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        context: Context,
    ) -> torch.Tensor:
        assert context.block_tables is not None
        out = torch.zeros_like(q)
        for i, len_k in enumerate(context.context_lens.tolist()):
            if len_k:
                keys = _gather(k_cache, context.block_tables[i], len_k)
                values = _gather(v_cache, context.block_tables[i], len_k)
                out[i : i + 1] = _attend(q[i : i + 1], keys, values, scale)
        return out


def _gather(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence, [length, kv_heads, head_dim]."""
    block_ids = block_table[: -(-length // cache.shape[1])]
    return cache[block_ids].flatten(0, 1)[:length]


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [n, heads, head_dim], the sequence's last n positions; keys and values of all of them,
    [len, kv_heads, head_dim] -> [n, heads, head_dim]"""
    n, num_heads, head_dim = q.shape
    len_k, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    # [kv_heads, group, ...]: the heads that share K/V lie together; K/V is expanded, not copied
    q = q.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
    keys, values = (
        x.transpose(0, 1).unsqueeze(1).expand(num_kv_heads, group, len_k, head_dim)
        for x in (keys, values)
    )
    mask = None
    if 1 < n < len_k:
        mask = torch.ones(n, len_k, dtype=torch.bool, device=q.device).tril(len_k - n)
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=1 < n == len_k, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(n, num_heads, head_dim)
