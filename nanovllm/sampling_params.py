"""Per-request sampling knobs, checked and normalised at construction."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from nanovllm.utils.field_checks import (
    as_float,
    checked_biases,
    checked_ids,
    checked_int,
    checked_real,
    checked_texts,
)
from nanovllm.utils.shown import shown

MIN_TEMPERATURE = 1e-5  # logits / T stays far from the limits of fp32
MAX_TEMPERATURE = 1e30
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20  # alternatives that are reported for each token
MAX_PENALTY_FACTOR = 1e5  # as `MIN_TEMPERATURE`


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, when it ends, and what is reported of it.

    Logits change in this order: logit_bias and allowed_token_ids, repetition, presence and
    frequency penalty, temperature, min_p, top_k, top_p. Each of the last three works on the
    renormalised probabilities of what the one before has left.

    n: independent samples of the prompt, >= 1; 1 if greedy.
    temperature: >= 0; 0 takes the most likely token (greedy), ties to the lowest id.
    top_k: keeps exactly so many of the most likely ids, of equals the lower ones; 0 and -1 keep
        all, as does a number above the vocabulary.
    top_p: in (0, 1]; keeps the smallest set of the most likely ids whose probability reaches it.
    min_p: in [0, 1]; keeps ids whose probability is at least this share of the largest one.
    seed: in [0, 2**64); None derives one from `Config.seed` and the request's number.
    max_tokens: completion length at most, >= 1.
    min_tokens: completion length at least: before, nothing that ends the request is drawn, and no
        stop string counts.
    ignore_eos: do not end at the model's stop tokens.
    stop: texts that end the request; one str, or several.
    stop_token_ids: further ids that end the request, with `ignore_eos` as well.
    include_stop_str_in_output: the text ends after the stop string rather than before it.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: False makes no text.
    repetition_penalty: > 0; divides positive logits of ids in prompt and completion by this, and
        multiplies negative ones.
    presence_penalty: in [-2, 2]; is subtracted from the logits of ids in the completion.
    frequency_penalty: in [-2, 2]; as presence_penalty, times the number of occurrences.
    logit_bias: id -> number in [-100, 100] that is added to its logit.
    allowed_token_ids: the only ids that may be drawn; None allows all.
    logprobs, prompt_logprobs: reports for each token of the completion, or of the prompt, its log
        probability and those of so many most likely ids, 0 to 20; None reports none.

    Sequences are stored as tuples, a single `stop` and None included, NumPy numbers as Python's.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = False
    detokenize: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _set(self, "temperature", _temperature(self.temperature))
        for name, low, high in _INTS:
            _set(self, name, checked_int(name, getattr(self, name), low, high))
        for name, most in _OPTIONAL_INTS:
            if getattr(self, name) is not None:
                _set(self, name, checked_int(name, getattr(self, name), 0, most, "an int or None"))
        for name, least, most in _REALS:
            _set(self, name, checked_real(name, getattr(self, name), least, most))
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if self.top_p <= 0:
            raise ValueError(f"top_p must be in (0, 1], got {shown(self.top_p)}")
        _set(self, "stop", checked_texts("stop", self.stop))
        _set(self, "stop_token_ids", checked_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = checked_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids must be None or hold at least one id, got none")
            _set(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            _set(self, "logit_bias", checked_biases("logit_bias", self.logit_bias))
        self._check_together()

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)

    @property
    def edits_logits(self) -> bool:
        """Whether logits of some ids change before the temperature applies."""
        listed = self.logit_bias or self.allowed_token_ids or self.min_tokens
        return bool(listed) or self.has_penalties

    @property
    def is_filtered(self) -> bool:
        """Whether only some of the ids may be drawn, given their probabilities."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_plain(self) -> bool:
        """Whether a step does no more for the request than draw with its temperature."""
        is_silent = self.logprobs is None and self.prompt_logprobs is None
        return is_silent and not self.is_filtered and not self.edits_logits

    def check_ids(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Raises `ValueError` for ids beyond the vocabulary, and if no id could ever be drawn.

        eos_token_ids: ids that end a request unless it ignores them.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            largest = max(getattr(self, name) or (), default=0)
            if largest >= vocab_size:
                raise ValueError(
                    f"{name} must be ids below the model's vocabulary of {vocab_size}, "
                    f"got {shown(largest)}"
                )
        if self.min_tokens and self.allowed_token_ids is not None:
            ending = self.ending_ids(eos_token_ids)
            if ending.issuperset(self.allowed_token_ids):
                raise ValueError(
                    f"allowed_token_ids must be such that not all end the request, as "
                    f"min_tokens={self.min_tokens}, got {shown(list(self.allowed_token_ids))}"
                )

    def ending_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Returns the ids that end a request, `eos_token_ids` among them unless it ignores them."""
        own = frozenset(self.stop_token_ids or ())
        return own if self.ignore_eos else own.union(eos_token_ids)

    def _check_together(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n must be 1 with temperature 0, which gives equal samples, got {shown(self.n)}"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={shown(self.max_tokens)}, "
                f"got {shown(self.min_tokens)}"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                "detokenize must be True with stop strings, which are looked for in the text, "
                "got False"
            )


_INTS: tuple[tuple[str, int, float], ...] = (
    ("n", 1, inf),
    ("top_k", -1, inf),
    ("max_tokens", 1, inf),
    ("min_tokens", 0, inf),
)
_OPTIONAL_INTS: tuple[tuple[str, float], ...] = (
    ("seed", MAX_SEED),
    ("logprobs", MAX_LOGPROBS),
    ("prompt_logprobs", MAX_LOGPROBS),
)
_REALS: tuple[tuple[str, float, float], ...] = (
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1 / MAX_PENALTY_FACTOR, MAX_PENALTY_FACTOR),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
_BOOLS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


def _set(params: SamplingParams, name: str, value: object) -> None:
    """Replaces a field of a frozen object under construction by its normalised value."""
    if value is not getattr(params, name):
        object.__setattr__(params, name, value)


def _temperature(value: Any) -> float:
    number = as_float("temperature", value)
    if not 0 <= number <= MAX_TEMPERATURE:  # nor nan
        raise ValueError(
            f"temperature must be finite, at most {MAX_TEMPERATURE} and >= 0 (0 is greedy), "
            f"got {shown(value)}"
        )
    if 0 < number < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {shown(value)}"
        )
    return number
