"""Attention over the paged K/V cache: the module, and the protocol of what computes it."""

from types import ModuleType
from typing import Protocol

import torch
from torch import nn

from nanovllm.kernels import cpu_kernels
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context


class AttentionBackend(Protocol):
    """Causal attention; caches are [num_blocks, block_size, kv_heads, head_dim].

    Query head h uses K/V head h // (heads / kv_heads). Each sequence's last query is aligned with
    its last key. The step's own K/V is already in the cache.
    """

    name: str

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
        """q [t, heads, head_dim], k and v [t, kv_heads, head_dim] of the step -> as q."""
        ...

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        context: Context,
    ) -> torch.Tensor:
        """q [n, heads, head_dim], one token per sequence -> as q; context length 0 gives zeros."""
        ...

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int) -> list[int]:
        """Batch sizes up to `max_num_seqs` which between them need all that is compiled for
        `decode`; none if nothing is."""
        ...


class Attention(nn.Module):
    """All between the QKV projection and the output projection. The runner binds backend and
    caches after sizing them."""

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
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        rotary: RotaryEmbedding,
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> torch.Tensor:
        """Normalises (q, k by `norms`), rotates, stores, attends.

        qkv [t, (heads + 2 * kv_heads) * head_dim], q | k | v, may be overwritten
        -> [t, heads * head_dim]
        """
        assert self.backend is not None, "the runner binds a backend before the first step"
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        kernels = _fused_kernels(qkv)
        if kernels is not None:
            kernels.norm_rope_store(
                qkv,
                positions,
                context.slot_mapping,
                rotary.cos_sin,
                (norms[0].weight, norms[1].weight) if norms else None,
                norms[0].eps if norms else 0.0,
                self.k_cache,
                self.v_cache,
            )
        else:
            qk = qkv[:, : self.num_heads + self.num_kv_heads]
            if norms is not None:
                qk = torch.cat((norms[0](q), norms[1](k)), dim=1)
            q, k = rotary(positions, qk).split([self.num_heads, self.num_kv_heads], dim=1)
            store_kv(k, v, self.k_cache, self.v_cache, context.slot_mapping)
        if context.cu_seqlens_q is None:
            out = self.backend.decode(q, self.k_cache, self.v_cache, self.scale, context)
        else:
            out = self.backend.prefill(q, k, v, self.k_cache, self.v_cache, self.scale, context)
        return out.flatten(1)


def _fused_kernels(qkv: torch.Tensor) -> ModuleType | None:
    """Those that have a `norm_rope_store` for this tensor."""
    if qkv.is_cuda:
        from nanovllm.kernels import qkv as cuda_kernels

        return cuda_kernels
    return cpu_kernels(qkv)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes k, v [t, kv_heads, head_dim] to their slots; without padding, as only CUDA graphs
    have."""
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
