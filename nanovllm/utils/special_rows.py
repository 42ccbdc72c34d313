"""What the rows of a batch want beyond plain sampling, as the samplers read it on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FilterRows:
    """How m rows of logits are filtered and drawn from; [m] each.

    index: int64, the row of the logits.
    rows: int64, the row of the per-row state.
    top_ks: int64, how many ids are kept; 0 keeps all.
    top_ps: fp64, the probability to reach; 1 keeps all.
    log_min_ps: fp64, the logarithm of the share of the largest probability; -inf keeps all.
    """

    index: Tensor
    rows: Tensor
    top_ks: Tensor
    top_ps: Tensor
    log_min_ps: Tensor

    @staticmethod
    def columns(
        index: Sequence[int], rows: Sequence[int], params: Sequence[SamplingParams]
    ) -> list[np.ndarray]:
        """Returns the fields on the host."""
        with np.errstate(divide="ignore"):
            log_min_ps = np.log(np.array([p.min_p for p in params]))
        return [
            np.array(index),
            np.array(rows),
            np.array([min(max(p.top_k, 0), 2**31 - 1) for p in params]),
            np.array([p.top_p for p in params]),
            log_min_ps,
        ]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LogitEdits:
    """Ids of one row whose logits change by themselves, each at most once.

    is_only: all other ids may not be drawn.
    ids: int64 [e]; ~id for an id that may not be drawn before the row's `min_lens`.
    biases: fp64 [e], added to the logits of the model.
    """

    is_only: bool
    ids: Tensor
    biases: Tensor

    @staticmethod
    def columns(
        params: SamplingParams, late_ids: frozenset[int], vocab_size: int
    ) -> list[np.ndarray]:
        """Returns ids and biases on the host; `late_ids` are drawn after `min_tokens` others."""
        biases, allowed = params.logit_bias or {}, params.allowed_token_ids
        listed = {*biases, *late_ids} if allowed is None else set(allowed)
        ids = sorted(i for i in listed if i < vocab_size)  # stop ids need not be in the vocabulary
        return [
            np.array([~i if i in late_ids else i for i in ids], dtype=np.int64),
            np.array([biases.get(i, 0.0) for i in ids], dtype=np.float64),
        ]


@dataclass(frozen=True, slots=True)
class EditRows:
    """How the logits of m rows change before they are drawn from; tensors [m].

    edits: those of each row by itself.
    has_penalties: whether any row's logits depend on its tokens.
    index, rows: as in `FilterRows`.
    is_only, num_edits, id_addresses, bias_addresses: int64, the `edits` as kernels read them.
    num_prompts: int64, the tokens of the row that belong to its prompt.
    min_lens: int64, the length of the row from which on any id may be drawn.
    repetition, presence, frequency: fp64, the penalties.
    """

    edits: Sequence[LogitEdits]
    has_penalties: bool
    index: Tensor
    rows: Tensor
    is_only: Tensor
    num_edits: Tensor
    id_addresses: Tensor
    bias_addresses: Tensor
    num_prompts: Tensor
    min_lens: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @staticmethod
    def columns(
        index: Sequence[int],
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        edits: Sequence[LogitEdits],
        num_prompts: Sequence[int],
    ) -> list[np.ndarray]:
        """Returns the tensors on the host."""
        pairs = list(zip(num_prompts, params, strict=True))
        ints: list[list[Any]] = [
            [e.is_only for e in edits],
            [len(e.ids) for e in edits],
            [e.ids.data_ptr() for e in edits],
            [e.biases.data_ptr() for e in edits],
            list(num_prompts),
            [num + min(p.min_tokens, 2**31) for num, p in pairs],
        ]
        return [
            np.array(index),
            np.array(rows),
            *(np.array(column, dtype=np.int64) for column in ints),
            np.array([p.repetition_penalty for p in params]),
            np.array([p.presence_penalty for p in params]),
            np.array([p.frequency_penalty for p in params]),
        ]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log probabilities in m distributions of the model: of one id, and of the most likely ones.

    ids: int64 [m, 1 + k], the id that is asked for, then the k most likely, of equals the lower ids
        first.
    logprobs: fp32 [m, 1 + k], theirs.
    """

    ids: Tensor
    logprobs: Tensor
