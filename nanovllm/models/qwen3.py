"""Qwen3 (arXiv:2505.09388) and Qwen2 (arXiv:2407.10671), which differ in attention only."""

from transformers import PretrainedConfig

from nanovllm.models.decoder import AttentionSpec, DecoderForCausalLM, resolve_head_dim


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Normalises each query and key head; its projections have biases if the config says so."""

    @staticmethod
    def attention_spec(hf_config: PretrainedConfig) -> AttentionSpec:
        bias = hf_config.attention_bias
        return AttentionSpec(resolve_head_dim(hf_config), qk_norm=True, qkv_bias=bias, o_bias=bias)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Has biases on q, k and v always, and no head norms."""

    @staticmethod
    def attention_spec(hf_config: PretrainedConfig) -> AttentionSpec:
        return AttentionSpec(
            resolve_head_dim(hf_config), qk_norm=False, qkv_bias=True, o_bias=False
        )
