"""Attention over the paged K/V cache: the module, and the protocol of what computes it."""

from typing import Protocol

import torch
from torch import nn

from nanovllm.utils.context import Context


class AttentionBackend(Protocol):
    """Stores and attends; caches are [num_blocks, block_size, kv_heads, head_dim].

    Query head h uses K/V head h // (heads / kv_heads). Attention is causal, the last query aligned
    with the last key.
    """

    name: str

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes k, v [t, kv_heads, head_dim] to their slots; slot -1 is skipped."""
        ...

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
        """q, k, v of this step (k, v already stored) -> output [t, heads, head_dim], as q.

        Rows of context length 0 come out as zeros.
        """
        ...


class Attention(nn.Module):
    """Softmax(q k^T / sqrt(head_dim)) v. The runner binds backend and caches after sizing them."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.backend: AttentionBackend | None = None
        self.k_cache = self.v_cache = torch.empty(0)

    def bind(self, backend: AttentionBackend, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        self.backend, self.k_cache, self.v_cache = backend, k_cache, v_cache

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """q [t, heads, head_dim], k and v [t, kv_heads, head_dim] -> [t, heads * head_dim]"""
        assert self.backend is not None, "the runner binds a backend before the first step"
        self.backend.store(k, v, self.k_cache, self.v_cache, context.slot_mapping)
        out = self.backend.attend(q, k, v, self.k_cache, self.v_cache, self.scale, context)
        return out.flatten(1)
