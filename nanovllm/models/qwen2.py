"""Qwen2 (arXiv:2407.10671): what distinguishes the family from others."""

from transformers import PretrainedConfig

from nanovllm.models.config_fields import resolve_head_dim
from nanovllm.models.decoder import AttentionSpec, DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Has biases on q, k and v always, and no head norms."""

    @staticmethod
    def attention_spec(hf_config: PretrainedConfig) -> AttentionSpec:
        return AttentionSpec(
            resolve_head_dim(hf_config), qk_norm=False, qkv_bias=True, o_bias=False
        )
