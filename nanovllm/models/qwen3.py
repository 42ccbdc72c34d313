"""Qwen3 (arXiv:2505.09388): what distinguishes the family from others."""

from transformers import PretrainedConfig

from nanovllm.models.config_fields import resolve_head_dim
from nanovllm.models.decoder import AttentionSpec, DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Normalises each query and key head; its projections have biases if the config says so."""

    @staticmethod
    def attention_spec(hf_config: PretrainedConfig) -> AttentionSpec:
        bias = bool(getattr(hf_config, "attention_bias", False))
        return AttentionSpec(resolve_head_dim(hf_config), qk_norm=True, qkv_bias=bias, o_bias=bias)
