"""Attention over the paged K/V cache: the module, and the protocol of its backends."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from nanovllm.kernels import cpu_kernels
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context
from nanovllm.utils.kv_format import QuantisedKV, quantise


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the K/V pool; an iterable of `k` and `v`.

    k, v: [num_blocks, block_size, kv_heads, head_dim] each; uint8 codes if there are scales.
    scales: bf16 [num_blocks, kv_heads, block_size, 2], of K and V in 8 bits (`QuantisedKV`).
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.k, self.v))

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns K and V of slots, int64 [n], in `dtype`: [n, kv_heads, head_dim] each."""
        k, v = (pool.flatten(0, 1).index_select(0, slots) for pool in (self.k, self.v))
        if self.scales is None:
            return k.to(dtype), v.to(dtype)
        block_size = self.k.shape[1]
        scales = self.scales[slots // block_size, :, slots % block_size]
        return QuantisedKV(k, v, scales).dequantise(dtype)


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

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int, kv_itemsize: int = 2) -> list[int]:
        """Returns batch sizes up to `max_num_seqs` that between them need all compiled code of
        `decode`; none if nothing is compiled. kv_itemsize: bytes of an element of K or V."""
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
        kernels = _fused_kernels(qkv, self.cache)
        if kernels is not None:  # in place: q and k are views of qkv
            kernels.norm_rope_store(
                qkv,
                positions,
                context.slot_mapping,
                rotary.cos_sin,
                (norms[0].weight, norms[1].weight) if norms else None,
                norms[0].eps if norms else 0.0,
                *self.cache,
                *([] if self.cache.scales is None else [self.cache.scales]),
            )
        else:
            qk = qkv[:, : self.num_heads + self.num_kv_heads]
            if norms is not None:
                qk = torch.cat((norms[0](q), norms[1](k)), dim=1)
            q, k = rotary(positions, qk).split([self.num_heads, self.num_kv_heads], dim=1)
            k, v = store_kv(k, v, self.cache, context.slot_mapping)
        if context.cu_seqlens_q is None:
            out = self.backend.decode(q, self.cache, self.scale, context)
        else:
            out = self.backend.prefill(q, k, v, self.cache, self.scale, context)
        return out.flatten(1)


def _fused_kernels(qkv: Tensor, cache: LayerCache) -> ModuleType | None:
    """Returns the module with a fused `norm_rope_store` for these, None if there is none."""
    if qkv.is_cuda:
        from nanovllm.kernels import qkv as cuda_kernels

        return cuda_kernels
    return cpu_kernels(qkv) if cache.scales is None else None


def store_kv(
    k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes k and v [t, kv_heads, head_dim] to their slots of the cache, except where it is -1.

    Returns k and v as the cache rounds them, so that attention to a step's own keys and attention
    to cached ones give the same.
    """
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    k_cache, v_cache = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
    if cache.scales is None:
        kept_k, kept_v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        k_cache.index_copy_(0, slots, kept_k[is_stored])
        v_cache.index_copy_(0, slots, kept_v[is_stored])
        return kept_k.to(k.dtype), kept_v.to(v.dtype)
    kept = quantise(k, v)
    k_cache.index_copy_(0, slots, kept.k[is_stored])
    v_cache.index_copy_(0, slots, kept.v[is_stored])
    block_size = cache.k.shape[1]
    cache.scales[slots // block_size, :, slots % block_size] = kept.scales[is_stored]
    return kept.dequantise(k.dtype)
