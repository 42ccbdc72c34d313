"""Attention by the project's own Triton kernels, for any GQA ratio and heads up to 256."""

from torch import Tensor

from nanovllm.layers.attention import LayerCache
from nanovllm.utils.context import Context


class TritonBackend:
    name = "triton"

    def __init__(self) -> None:
        # Here, not at import: triton need not be installed where this backend is not chosen.
        from nanovllm.kernels.decode_attention import decode_attention
        from nanovllm.kernels.decode_launch import decode_config
        from nanovllm.kernels.dependent_launch import FEW_TOKENS
        from nanovllm.kernels.prefill_attention import prefill_attention

        self._decode, self._prefill = decode_attention, prefill_attention
        self._decode_config, self._few_tokens = decode_config, FEW_TOKENS

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, scale: float, context: Context
    ) -> Tensor:
        assert context.cu_seqlens_q is not None
        assert context.cu_seqlens_k is not None
        kv_scales = None
        if context.block_tables is not None:
            (k, v), kv_scales = cache, cache.scales
        out: Tensor = self._prefill(
            q,
            k,
            v,
            context.block_tables,
            context.cu_seqlens_q,
            context.cu_seqlens_k,
            context.max_seqlen_k,
            scale,
            kv_scales,
        )
        return out

    def decode(self, q: Tensor, cache: LayerCache, scale: float, context: Context) -> Tensor:
        assert context.block_tables is not None
        out: Tensor = self._decode(
            q,
            cache.k,
            cache.v,
            context.block_tables,
            context.context_lens,
            scale,
            prefixes=context.shared_prefixes,
            kv_scales=cache.scales,
        )
        return out

    def decode_sizes(self, max_num_seqs: int, num_kv_heads: int, kv_itemsize: int = 2) -> list[int]:
        sizes = range(1, max_num_seqs + 1)
        by_code = {}
        for size in sizes:
            config = self._decode_config(size * num_kv_heads, kv_itemsize=kv_itemsize)
            by_code[config.compiled_as, size <= self._few_tokens] = size
        return list(by_code.values())
