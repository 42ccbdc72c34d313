"""Which values the fields of a config.json may have, whatever the model family.

A value of another type or size would fail somewhere inside, give wrong text or take all memory. So
the raw file is checked before transformers sees it, which would make lists of absurd sizes, and
what it makes of the file is checked again. Each error names the field, its value and what it may
be.
"""

import math
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from nanovllm.utils.shown import shown

MAX_SIZE = 2**31 - 1
MAX_LABELS = 2**16  # of classifiers: transformers makes a table of them
MAX_HEAD_DIM = 2**16  # frequencies of RoPE are computed before the weights' shapes are compared
SIZES = {  # -> the largest that is no mistake
    "num_hidden_layers": 1000,
    "hidden_size": MAX_SIZE,
    "intermediate_size": MAX_SIZE,
    "num_attention_heads": MAX_SIZE,
    "num_key_value_heads": MAX_SIZE,
    "vocab_size": MAX_SIZE,
    "max_position_embeddings": MAX_SIZE,
}
# The same of mixtures of experts, which dense families lack.
EXPERT_SIZES = {
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "num_experts_per_tok": 10_000,
    "moe_intermediate_size": MAX_SIZE,
    "decoder_sparse_step": MAX_SIZE,
}


def _is_int(value: object, low: int = 0, high: int = MAX_SIZE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_list(value: object, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(is_item(item) for item in value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


BOOLEAN = _is_bool, "true or false"
COUNT = _is_int, f"an int from 0 to {MAX_SIZE}"
OBJECT = _is_object, "an object"
# Fields that may be null or absent -> what else they may be.
OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_type": (_is_text, "a text"),
    "hidden_act": (_is_text, "a text"),
    "head_dim": (
        lambda value: _is_int(value, 2, MAX_HEAD_DIM) and value % 2 == 0,
        f"a positive, even int up to {MAX_HEAD_DIM}",
    ),
    "rms_norm_eps": (
        lambda value: _is_number(value) and 0 <= value < 1,
        "a small positive number",
    ),
    "rope_theta": (lambda value: _is_number(value) and value > 0, "a positive number"),
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "sliding_window": COUNT,
    "max_window_layers": COUNT,
    "layer_types": (lambda value: _is_list(value, _is_text), "a list of texts"),
    "mlp_only_layers": (lambda value: _is_list(value, _is_int), "a list of ints"),
    "eos_token_id": (
        lambda value: _is_int(value) or _is_list(value, _is_int),
        "a token id or a list of token ids",
    ),
    "num_labels": (lambda value: _is_int(value, 0, MAX_LABELS), f"an int up to {MAX_LABELS}"),
    "attention_bias": BOOLEAN,
    "mlp_bias": BOOLEAN,
    "norm_topk_prob": BOOLEAN,
    "tie_word_embeddings": BOOLEAN,
    "use_sliding_window": BOOLEAN,
}


def check_fields(content: dict[str, Any]) -> None:
    """Raises `ValueError` for a field of config.json that no model could have."""
    for name in SIZES:
        if content.get(name) is not None:
            check_size(name, content[name])
    for name in OPTIONAL:
        _check_optional(name, content.get(name))


def check_sizes(hf_config: PretrainedConfig) -> None:
    """Raises `ValueError` for fields that are missing, absurd or do not fit together."""
    for name in SIZES:
        check_size(name, getattr(hf_config, name, None))
    for name in OPTIONAL:
        _check_optional(name, getattr(hf_config, name, None))
    if getattr(hf_config, "rms_norm_eps", None) is None:
        raise ValueError("config.json has no rms_norm_eps, which must be a small positive number")
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    resolve_head_dim(hf_config)


def check_size(name: str, value: object) -> None:
    """Raises `ValueError` if one of `SIZES` or `EXPERT_SIZES` is no such size."""
    most = (SIZES | EXPERT_SIZES)[name]
    if not _is_int(value, 1, most):
        raise ValueError(
            f"{name} must be an int from 1 to {most}, got {shown(value)} in config.json"
        )


def resolve_head_dim(hf_config: PretrainedConfig) -> int:
    """Returns the config's head_dim or, where it has none, hidden_size / num_attention_heads."""
    head_dim: int | None = getattr(hf_config, "head_dim", None)
    hidden_size, heads = hf_config.hidden_size, hf_config.num_attention_heads
    if head_dim is None:
        if hidden_size % heads:
            raise ValueError(
                f"hidden_size={hidden_size} is no multiple of num_attention_heads={heads}, and "
                "the config has no head_dim"
            )
        head_dim = hidden_size // heads
    _check_optional("head_dim", head_dim)
    return head_dim


def _check_optional(name: str, value: object) -> None:
    is_valid, what = OPTIONAL[name]
    if value is not None and not is_valid(value):
        raise ValueError(f"{name} must be {what}, got {shown(value)} in config.json")
