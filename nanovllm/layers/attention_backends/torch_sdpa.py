"""Attention in plain torch over gathered pages: any device, and the oracle of every other backend.

Prefill takes one sequence at a time, without padding. Decode takes a few sequences at a time, and
neighbours, which the scheduler has sorted by length: what is short of the longest is padded with
its own first token, and masked. On a CPU each call costs more than its arithmetic, so they are few;
but a group never has more padding than tokens. K/V may be in another dtype than the queries.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.attention import LayerCache
from nanovllm.utils.context import Context

GROUP_SIZE = 16  # bounds a decode group's gathered K/V: at most so many times the longest sequence


@dataclass(frozen=True, slots=True)
class _Group:
    """Some sequences that decode together: g of them, padded to the `length` of the longest.

    members: which of the step's sequences they are.
    slots: int64 [g * length], the slots of their tokens' K/V.
    mask: [g, 1, 1, length], added to the scores: 0 for a token, -inf for padding.
    is_empty: bool [g, 1, 1], which have no token at all; None if all have some.
    """

    members: slice
    slots: Tensor
    mask: Tensor
    is_empty: Tensor | None


class TorchBackend:
    name = "torch"

    def __init__(self) -> None:
        self._groups: tuple[Context | None, list[_Group]] = (None, [])  # of the latest decode step

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, scale: float, context: Context
    ) -> Tensor:
        assert context.cu_seqlens_q is not None
        starts = context.cu_seqlens_q.tolist()
        out = torch.zeros_like(q)
        for i, len_k in enumerate(context.context_lens.tolist()):
            new = slice(starts[i], starts[i + 1])
            keys, values = k[new], v[new]
            if context.block_tables is not None:
                slots = _slots(context.block_tables[i], len_k, cache.k.shape[1])
                keys, values = cache.read(slots, q.dtype)
            out[new] = _attend(q[new], keys, values, scale)
        return out

    def decode(self, q: Tensor, cache: LayerCache, scale: float, context: Context) -> Tensor:
        if self._groups[0] is not context:  # every layer of a step passes the same object
            self._groups = context, _decode_groups(context, cache.k.shape[1], q.dtype)
        _, _, num_kv_heads, head_dim = cache.k.shape
        outs: list[Tensor] = []
        for group in self._groups[1]:
            # The queries that share a K/V head are to it as queries of one sequence.
            queries = q[group.members].view(-1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
            shape = len(queries), -1, num_kv_heads, head_dim
            keys, values = (
                x.view(shape).transpose(1, 2) for x in cache.read(group.slots, q.dtype)
            )  # [g, kv_heads, length, head_dim]
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=group.mask, scale=scale
            ).flatten(1, 2)
            outs.append(out if group.is_empty is None else out.masked_fill(group.is_empty, 0))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int, kv_itemsize: int = 2) -> list[int]:
        return []


def _decode_groups(context: Context, block_size: int, dtype: torch.dtype) -> list[_Group]:
    """Groups the sequences of a decode step, each with its neighbours."""
    assert context.block_tables is not None
    groups = []
    for members in _slices(context.context_lens.tolist()):
        lens = context.context_lens[members].unsqueeze(1)
        positions = torch.arange(int(lens.max()), device=lens.device)
        is_padding = positions >= lens  # [g, length]
        # Not what the pool holds behind the last token: it may be NaN, which no mask takes out.
        positions = positions.masked_fill(is_padding, 0)
        block_ids = context.block_tables[members].long().gather(1, positions // block_size)
        is_empty = lens == 0
        slots = block_ids.masked_fill(is_empty, 0) * block_size + positions % block_size
        mask = torch.zeros(slots.shape, dtype=dtype, device=slots.device)
        mask.masked_fill_(is_padding, float("-inf"))
        empty = is_empty.unsqueeze(2) if is_empty.any() else None
        groups.append(_Group(members, slots.flatten(), mask[:, None, None], empty))
    return groups


def _slices(lens: list[int]) -> list[slice]:
    """Cuts a batch of these context lengths into groups of at most `GROUP_SIZE` neighbours.

    A group ends where one more sequence would make more padding than the group has tokens.
    """
    slices: list[slice] = []
    first = 0
    for end in range(1, len(lens) + 1):
        group = lens[first : end + 1]  # with the next one
        is_full = end - first == GROUP_SIZE or end == len(lens)
        if is_full or max(group) * len(group) > 2 * sum(group):
            slices.append(slice(first, end))
            first = end
    return slices


def _slots(block_table: Tensor, length: int, block_size: int) -> Tensor:
    """Returns the slots of the first `length` tokens of a sequence, int64 [length]."""
    positions = torch.arange(length, device=block_table.device)
    return block_table[positions // block_size].long() * block_size + positions % block_size


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attends the last n positions of one sequence to all of its keys.

    q [n, heads, head_dim], keys and values [len, kv_heads, head_dim] -> [n, heads, head_dim]
    """
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
