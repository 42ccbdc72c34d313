"""Attention on a CPU by the kernels of kernels/cpu, which walk the block tables."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels import cpu_module
from nanovllm.layers.attention import LayerCache
from nanovllm.utils.context import Context


@dataclass(frozen=True, slots=True)
class _DecodeTokens:
    """A decode step's tokens as `attend` of the kernels takes them."""

    tables: Tensor
    seqs: Tensor
    lens: Tensor


class NumbaBackend:
    """Takes activations in fp32, which are those of packed weights."""

    name = "numba"

    def __init__(self) -> None:
        # Of the latest step: every layer of a step passes the same context.
        self._tokens: tuple[Context, _DecodeTokens] | None = None
        self._plan: tuple[Context, Any] | None = None
        cpu = cpu_module()
        assert cpu is not None
        self._kernels = cpu

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, scale: float, context: Context
    ) -> Tensor:
        _, block_size, kv_heads, head_dim = cache.k.shape
        if self._plan is None or self._plan[0] is not context:
            assert context.cu_seqlens_q is not None
            starts, lens = context.cu_seqlens_q.tolist(), context.context_lens.tolist()
            tables = _tables(context, starts, block_size)
            group = q.shape[1] // kv_heads
            plan = self._kernels.plan_prefill(starts, lens, tables, group, (kv_heads, head_dim))
            self._plan = context, plan
        out: Tensor = self._kernels.attend_many(q, *cache, scale, self._plan[1])
        return out

    def decode(self, q: Tensor, cache: LayerCache, scale: float, context: Context) -> Tensor:
        if self._tokens is None or self._tokens[0] is not context:
            assert context.block_tables is not None
            lens = context.context_lens.long()
            tokens = _DecodeTokens(context.block_tables.long(), torch.arange(len(lens)), lens)
            self._tokens = context, tokens
        tokens = self._tokens[1]
        out: Tensor = self._kernels.attend(
            q, *cache, scale, tokens.tables, tokens.seqs, tokens.lens
        )
        return out

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int, kv_itemsize: int = 2) -> list[int]:
        return []  # all is compiled by dtype alone


def _tables(context: Context, starts: list[int], block_size: int) -> Tensor:
    """Returns the block tables of a prefill, int64 [n, width]; without cached prefixes they follow
    from the slots."""
    if context.block_tables is not None:
        return context.block_tables.long().contiguous()
    longest = max(end - start for start, end in pairwise(starts))
    tables = torch.zeros(len(starts) - 1, -(-longest // block_size), dtype=torch.int64)
    for table, (start, end) in zip(tables, pairwise(starts), strict=True):
        blocks = context.slot_mapping[start:end:block_size] // block_size
        table[: len(blocks)] = blocks
    return tables
