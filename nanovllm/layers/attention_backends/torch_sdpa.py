"""Attention in plain torch over gathered pages: any device, and the oracle of every other backend.

Prefill takes one sequence at a time, without padding. Decode takes a few sequences at a time, and
neighbours, which the scheduler has sorted by length: what is short of the longest is padded with
its own first token, and masked. On a CPU each call costs more than its arithmetic, so they are few.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.utils.context import Context

GROUP_SIZE = 16  # bounds a decode group's gathered K/V: at most so many times the longest sequence


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that decode together, g of them, the longest of `length` tokens.

    rows: which of the step's sequences.
    slots: int64 [g * length], where their tokens' K/V is.
    mask: [g, 1, 1, length], to be added to the scores: 0 for a token, -inf for padding.
    is_empty: bool [g, 1, 1], those that have no token, None if there are none.
    """

    rows: slice
    slots: torch.Tensor
    mask: torch.Tensor
    is_empty: torch.Tensor | None


class TorchBackend:
    name = "torch"

    def __init__(self) -> None:
        self._groups: tuple[Context | None, list[_Group]] = (None, [])  # of the latest decode step

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
        if self._groups[0] is not context:  # every layer of a step passes the same object
            self._groups = context, _decode_groups(context, k_cache.shape[1], q.dtype)
        _, _, num_kv_heads, head_dim = k_cache.shape
        caches = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        outs: list[torch.Tensor] = []
        for group in self._groups[1]:
            # The queries that share a K/V head are to it as queries of one sequence.
            queries = q[group.rows].view(-1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
            shape = len(queries), -1, num_kv_heads, head_dim
            keys, values = (
                cache.index_select(0, group.slots).view(shape).transpose(1, 2) for cache in caches
            )  # [g, kv_heads, length, head_dim]
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=group.mask, scale=scale
            ).flatten(1, 2)
            outs.append(out if group.is_empty is None else out.masked_fill(group.is_empty, 0))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int) -> list[int]:
        return []


def _decode_groups(context: Context, block_size: int, dtype: torch.dtype) -> list[_Group]:
    """The step's sequences, neighbours together."""
    assert context.block_tables is not None
    groups = []
    for first in range(0, len(context.context_lens), GROUP_SIZE):
        rows = slice(first, first + GROUP_SIZE)
        lens = context.context_lens[rows].unsqueeze(1)
        positions = torch.arange(int(lens.max()), device=lens.device)
        is_padding = positions >= lens  # [g, length]
        # Not what the pool holds behind the last token: it may be NaN, which no mask takes out.
        positions = positions.masked_fill(is_padding, 0)
        block_ids = context.block_tables[rows].long().gather(1, positions // block_size)
        is_empty = lens == 0
        slots = block_ids.masked_fill(is_empty, 0) * block_size + positions % block_size
        mask = torch.zeros(slots.shape, dtype=dtype, device=slots.device)
        mask.masked_fill_(is_padding, float("-inf"))
        empty = is_empty.unsqueeze(2) if is_empty.any() else None
        groups.append(_Group(rows, slots.flatten(), mask[:, None, None], empty))
    return groups


def _gather(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence, [length, kv_heads, head_dim]."""
    block_ids = block_table[: -(-length // cache.shape[1])]
    return cache.index_select(0, block_ids).flatten(0, 1)[:length]


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
