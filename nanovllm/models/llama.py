"""Llama (arXiv:2407.21783): what distinguishes the family from others."""

from transformers import PretrainedConfig

from nanovllm.models.config_fields import resolve_head_dim
from nanovllm.models.decoder import AttentionSpec, DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Has no head norms; its attention and its MLP have biases if the config says so."""

    @staticmethod
    def attention_spec(hf_config: PretrainedConfig) -> AttentionSpec:
        bias = bool(getattr(hf_config, "attention_bias", False))
        return AttentionSpec(resolve_head_dim(hf_config), qk_norm=False, qkv_bias=bias, o_bias=bias)
