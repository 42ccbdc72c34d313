"""Mistral (arXiv:2310.06825): what distinguishes the family from others."""

from transformers import PretrainedConfig

from nanovllm.models.config_fields import resolve_head_dim
from nanovllm.models.decoder import AttentionSpec, DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """Has neither head norms nor biases.

    Its sliding window is refused where a sequence can outgrow it, and changes nothing elsewhere.
    """

    @staticmethod
    def attention_spec(hf_config: PretrainedConfig) -> AttentionSpec:
        return AttentionSpec(
            resolve_head_dim(hf_config), qk_norm=False, qkv_bias=False, o_bias=False
        )
