"""Which rotation frequencies a config asks for: theta, and scalings for longer contexts.

A scaling is a class here and an entry of `SCALINGS` under the name that configs give it. Each
equals what Hugging Face computes, except that frequencies never change within an engine's life,
because keys stay in the cache as they were rotated: see `DynamicNTKScaling`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nanovllm.utils.shown import shown

Parameters = Mapping[str, Any]
MAX_PARAMETER = 1e15  # products of two are finite


class RopeScaling(Protocol):
    """Changes the frequencies of plain RoPE so that a model serves longer contexts."""

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        ...

    def frequencies(self, theta: float, head_dim: int, max_model_len: int) -> Tensor:
        """Returns radians per position, fp32 [head_dim / 2]."""
        ...

    def max_context(self, max_position_embeddings: int) -> int:
        """Returns the most tokens that a model with this scaling is meant for."""
        ...


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: the base of the frequencies; scaling: None is plain RoPE."""

    theta: float
    scaling: RopeScaling | None = None


def plain_frequencies(theta: float, head_dim: int) -> Tensor:
    """Returns theta^(-2i / head_dim), fp32 [head_dim / 2].

    They are computed on the CPU whatever the default device, so that all devices rotate alike.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all positions by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    attention_factor: float = 1.0

    @classmethod
    def read(cls, params: Parameters, max_position_embeddings: int) -> "LinearScaling":
        return cls(_positive(params, "factor"))

    def frequencies(self, theta: float, head_dim: int, max_model_len: int) -> Tensor:
        return plain_frequencies(theta, head_dim) / self.factor

    def max_context(self, max_position_embeddings: int) -> int:
        return int(max_position_embeddings * self.factor)


@dataclass(frozen=True, slots=True)
class DynamicNTKScaling:
    """Raises theta with the length of the sequence beyond the model's own context.

    Hugging Face computes new frequencies whenever a sequence outgrows all before it, and leaves the
    cached keys as they are, so its logits depend on what ran before. An engine whose cached keys
    serve many requests cannot do so: it takes the frequencies of a sequence of `max_model_len`
    tokens for all positions. Up to the model's own context that is plain RoPE.
    """

    factor: float
    max_position_embeddings: int
    attention_factor: float = 1.0

    @classmethod
    def read(cls, params: Parameters, max_position_embeddings: int) -> "DynamicNTKScaling":
        return cls(_positive(params, "factor"), max_position_embeddings)

    def frequencies(self, theta: float, head_dim: int, max_model_len: int) -> Tensor:
        stretch = max(max_model_len / self.max_position_embeddings, 1.0)
        growth = self.factor * stretch - (self.factor - 1)
        exponent = head_dim / max(head_dim - 2, 1)  # the one frequency of two entries has no base
        return plain_frequencies(theta * growth**exponent, head_dim)

    def max_context(self, max_position_embeddings: int) -> int:
        return int(max_position_embeddings * self.factor)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Divides low frequencies by `factor` and keeps high ones (arXiv:2309.00071).

    beta_fast, beta_slow: a frequency that turns at least `beta_fast` times within the original
        context is kept, one that turns at most `beta_slow` times is divided.
    truncate: the bounds between them are rounded outwards to whole frequencies.
    """

    factor: float
    original_max_position_embeddings: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    @classmethod
    def read(cls, params: Parameters, max_position_embeddings: int) -> "YarnScaling":
        original = _positive(params, "original_max_position_embeddings", max_position_embeddings)
        factor = _positive(params, "factor", max_position_embeddings / original)
        attention_factor = _attention_factor(factor)
        if params.get("mscale") and params.get("mscale_all_dim"):
            above, below = _positive(params, "mscale"), _positive(params, "mscale_all_dim")
            attention_factor = _attention_factor(factor, above) / _attention_factor(factor, below)
        return cls(
            factor,
            original,
            attention_factor=_positive(params, "attention_factor", attention_factor),
            beta_fast=_positive(params, "beta_fast", 32.0),
            beta_slow=_positive(params, "beta_slow", 1.0),
            truncate=bool(params.get("truncate", True)),
        )

    def frequencies(self, theta: float, head_dim: int, max_model_len: int) -> Tensor:
        low, high = (
            self._index(beta, theta, head_dim) for beta in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        width = high - low if high != low else 0.001
        divided = ((index - low) / width).clamp(0, 1)  # 0: kept, 1: divided by the factor
        plain = plain_frequencies(theta, head_dim)
        return plain / self.factor * divided + plain * (1 - divided)

    def _index(self, num_turns: float, theta: float, head_dim: int) -> float:
        """Returns the index, a fraction, of the frequency that turns so often in the original
        context."""
        turns_of_first = self.original_max_position_embeddings / (2 * math.pi)
        return head_dim * math.log(turns_of_first / num_turns) / (2 * math.log(theta))

    def max_context(self, max_position_embeddings: int) -> int:
        scaled = int(self.original_max_position_embeddings * self.factor)
        return max(max_position_embeddings, scaled)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by `factor` and keeps high ones, as Llama 3.1 and later do.

    low_freq_factor, high_freq_factor: how often the highest frequency that is fully divided, and
        the lowest that is kept, turn within the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float
    attention_factor: float = 1.0

    @classmethod
    def read(cls, params: Parameters, max_position_embeddings: int) -> "Llama3Scaling":
        low, high = _positive(params, "low_freq_factor"), _positive(params, "high_freq_factor")
        if high <= low:
            raise ValueError(f"high_freq_factor={high} of RoPE must exceed low_freq_factor={low}")
        return cls(
            _positive(params, "factor"),
            low,
            high,
            _positive(params, "original_max_position_embeddings", max_position_embeddings),
        )

    def frequencies(self, theta: float, head_dim: int, max_model_len: int) -> Tensor:
        plain = plain_frequencies(theta, head_dim)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / width).clamp(0, 1)
        return plain / self.factor * (1 - kept) + plain * kept

    def max_context(self, max_position_embeddings: int) -> int:
        return max_position_embeddings


class _Readable(Protocol):
    def read(self, params: Parameters, max_position_embeddings: int) -> RopeScaling:
        """Reads the fields of a config; raises `ValueError` naming the one that is wrong."""
        ...


SCALINGS: dict[str, _Readable] = {
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}


def read_rope(hf_config: PretrainedConfig) -> Rope:
    """Reads RoPE from `rope_parameters`, or as before transformers 5 from `rope_scaling` and
    `rope_theta`.

    Raises `ValueError` for what is not implemented: ignoring it would give fluent, wrong text.
    """
    found = getattr(hf_config, "rope_parameters", None)
    if not found:
        found = getattr(hf_config, "rope_scaling", None) or {}
    params = {key: value for key, value in dict(found).items() if value is not None}
    params.setdefault("rope_theta", getattr(hf_config, "rope_theta", None))
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ValueError(f"RoPE that differs between layers is not supported, got {shown(found)}")
    share = params.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if share not in (None, 1) or "mrope_section" in params:
        raise ValueError(f"RoPE of a part of each head is not supported, got {shown(found)}")
    if params["rope_theta"] is None:
        raise ValueError("the checkpoint's config.json has no rope_theta")
    theta = _positive(params, "rope_theta")
    if theta == 1:  # equal frequencies, whose logarithm YaRN divides by
        raise ValueError("rope_theta of RoPE must not be 1, got 1 in config.json")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(
            f"rope_type {shown(kind)} is not supported; supported: default, {', '.join(SCALINGS)}"
        )
    return Rope(theta, SCALINGS[kind].read(params, hf_config.max_position_embeddings))


def max_context(hf_config: PretrainedConfig) -> int:
    """Returns the most tokens of a sequence that the model is meant for, its scaling included."""
    own: int = hf_config.max_position_embeddings
    scaling = read_rope(hf_config).scaling
    return own if scaling is None else scaling.max_context(own)


def _attention_factor(factor: float, scale: float = 1.0) -> float:
    """Returns YaRN's factor of the attention's temperature, 1 without scaling."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _positive(params: Parameters, name: str, default: float | None = None) -> float:
    """Returns a field as a float; raises `ValueError` if it is missing or no positive number."""
    value = params.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1 / MAX_PARAMETER < value < MAX_PARAMETER:
        raise ValueError(
            f"{name} of RoPE must be a positive number, got {shown(value)} in config.json"
        )
    return float(value)
