"""What the shared blocks compute, and the refusal of every config that asks for something else.

A field that is ignored gives fluent, wrong text, which no user notices. So each check raises
`ValueError` with the field's name, its value and, where there is one, the fix.
"""

from typing import Any

from transformers import PretrainedConfig

from nanovllm.models.config_fields import check_sizes
from nanovllm.utils.shown import shown

# Fields of other families that change what a layer computes -> the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_chunk_size": None,
    "clip_qkv": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "use_qk_norm": False,
    "attention_sink": False,
}


def check_supported(hf_config: PretrainedConfig, max_model_len: int) -> None:
    """Raises `ValueError` for a config with which the decoder's blocks would give wrong text.

    max_model_len: the most tokens of a sequence, which no window of attention may be shorter than.
    """
    check_sizes(hf_config)
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ValueError(
            f"quantization_config={shown(hf_config.quantization_config)} is not supported; use "
            "a checkpoint of bfloat16, float16 or float32 weights"
        )
    for name, neutral in NEUTRAL.items():
        value = getattr(hf_config, name, None)
        if value is not None and value != neutral:
            raise ValueError(f"{name}={shown(value)} is not supported; only {neutral!r} is")
    _check_window(hf_config, max_model_len)


def check_silu(hf_config: PretrainedConfig) -> None:
    """Raises `ValueError` for another activation than that of SwiGLU."""
    if hf_config.hidden_act not in ("silu", "swish"):
        raise ValueError(
            f"hidden_act={shown(hf_config.hidden_act)} is not supported; only 'silu' is"
        )


def _check_window(hf_config: PretrainedConfig, max_model_len: int) -> None:
    """Refuses attention to the last few tokens alone, unless no sequence can outgrow its window."""
    window = getattr(hf_config, "sliding_window", None)
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(
                f"layer_types {shown(unknown)} are not supported; only full_attention is"
            )
        has_window = "sliding_attention" in kinds
        if has_window and window is None:
            raise ValueError("layer_types has sliding_attention, but the config no sliding_window")
    else:  # before transformers 4.53, and families whose layers are all alike
        num_full = getattr(hf_config, "max_window_layers", None) or 0
        is_on = getattr(hf_config, "use_sliding_window", True)
        has_window = bool(is_on and window and num_full < hf_config.num_hidden_layers)
    if has_window and window is not None and window < max_model_len:
        raise ValueError(
            "sliding-window attention is not supported; only full attention is, which is the same "
            f"up to sliding_window={window} tokens: set max_model_len={window} instead of "
            f"{max_model_len}"
        )
