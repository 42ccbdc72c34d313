"""Attention by the flash-attn package (FlashAttention-2, arXiv:2307.08691); an optional extra."""

from torch import Tensor

from nanovllm.layers.attention import LayerCache
from nanovllm.utils.context import Context

BLOCK_MULTIPLE = 256  # its paged kernels' page size


class FlashAttnBackend:
    name = "flash_attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen, self._with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, scale: float, context: Context
    ) -> Tensor:
        if context.block_tables is not None:
            k, v = cache
        out: Tensor = self._varlen(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=context.block_tables,
        )
        return out

    def decode(self, q: Tensor, cache: LayerCache, scale: float, context: Context) -> Tensor:
        out: Tensor = self._with_kvcache(
            q.unsqueeze(1),
            *cache,
            cache_seqlens=context.context_lens,
            block_table=context.block_tables,
            softmax_scale=scale,
            causal=True,
        )
        return out.squeeze(1)

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int, kv_itemsize: int = 2) -> list[int]:
        return []
