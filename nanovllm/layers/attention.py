"""Attention over the paged K/V cache: the module, and the protocol of its backends."""

from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanovllm.kernels import cpu_kernels
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context


class LayerCache(NamedTuple):
    """One layer's part of the K/V pool, [num_blocks, block_size, kv_heads, head_dim] each."""

    k: Tensor
    v: Tensor


class AttentionBackend(Protocol):
    """Causal attention over the paged K/V cache.

    Query head h uses K/V head h // (heads / kv_heads). Each sequence's last query is aligned with
    its last key. The step's own K/V is already in the cache.
    """

    name: str

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, scale: float, context: Context
    ) -> Tensor:
        """q [t, heads, head_dim], k and v [t, kv_heads, head_dim] of the step -> as q."""
        ...

    def decode(self, q: Tensor, cache: LayerCache, scale: float, context: Context) -> Tensor:
        """q [n, heads, head_dim], one token per sequence -> as q; context length 0 gives zeros."""
        ...

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int) -> list[int]:
        """Returns batch sizes up to `max_num_seqs` that between them need all compiled code of
        `decode`; none if nothing is compiled."""
        ...


class Attention(nn.Module):
    """What lies between the QKV projection and the output projection.

    The K/V cache binds its backend and its part of the pool.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.backend: AttentionBackend | None = None
        self.cache = LayerCache(torch.empty(0), torch.empty(0))

    def bind(self, backend: AttentionBackend, cache: LayerCache) -> None:
        self.backend, self.cache = backend, cache

    def forward(
        self,
        qkv: Tensor,
        positions: Tensor,
        context: Context,
        rotary: RotaryEmbedding,
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> Tensor:
        """Normalises and rotates q and k, stores k and v in the cache, and attends.

        qkv [t, (heads + 2 * kv_heads) * head_dim], q | k | v, may be overwritten
        -> [t, heads * head_dim]. norms: of the heads of q and k, None for no norm.
        """
        assert self.backend is not None, "the runner binds a backend before the first step"
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        kernels = _fused_kernels(qkv)
        if kernels is not None:  # in place: q and k are views of qkv
            kernels.norm_rope_store(
                qkv,
                positions,
                context.slot_mapping,
                rotary.cos_sin,
                (norms[0].weight, norms[1].weight) if norms else None,
                norms[0].eps if norms else 0.0,
                *self.cache,
            )
        else:
            qk = qkv[:, : self.num_heads + self.num_kv_heads]
            if norms is not None:
                qk = torch.cat((norms[0](q), norms[1](k)), dim=1)
            q, k = rotary(positions, qk).split([self.num_heads, self.num_kv_heads], dim=1)
            k, v = k.to(self.cache.k.dtype), v.to(self.cache.v.dtype)
            store_kv(k, v, self.cache, context.slot_mapping)
            k, v = k.to(q.dtype), v.to(q.dtype)
        if context.cu_seqlens_q is None:
            out = self.backend.decode(q, self.cache, self.scale, context)
        else:
            out = self.backend.prefill(q, k, v, self.cache, self.scale, context)
        return out.flatten(1)


def _fused_kernels(qkv: Tensor) -> ModuleType | None:
    """Returns the module with a fused `norm_rope_store` for this tensor, None if there is none."""
    if qkv.is_cuda:
        from nanovllm.kernels import qkv as cuda_kernels

        return cuda_kernels
    return cpu_kernels(qkv)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Writes k and v [t, kv_heads, head_dim] to their slots of the cache, except where it is -1."""
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    cache.k.flatten(0, 1).index_copy_(0, slots, k[is_stored])
    cache.v.flatten(0, 1).index_copy_(0, slots, v[is_stored])
