"""The contract between scheduler and runner: what one step computes, and how its ids come back.

A `ScheduledBatch` is plain data (small, picklable, no torch). It holds only what the runner does
not know yet: the runner keeps each row's block table, last token and length itself. So a prefill
carries the scheduled slice of the prompt, and a decode step little more than its rows.
"""

from array import array
from dataclasses import dataclass
from typing import Protocol

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowInit:
    """What starts a row for a newly admitted sequence; whatever the row held before is void.

    sampling_params: the caller's own object.
    seed: 64 bits that key the row's sampling noise.
    block_table: the blocks of all known tokens of the sequence.
    """

    sampling_params: SamplingParams
    seed: int
    block_table: list[int]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The part of one sequence that a prefill step computes.

    start: position of `token_ids[0]`; the tokens before it are cached.
    is_last: the chunk ends at the sequence's last known token, so the next token is sampled.
    init: set on the first chunk after admission.
    """

    start: int
    token_ids: "array[int] | list[int]"
    is_last: bool
    init: RowInit | None


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """A new entry of a block table: `block_id` becomes entry `index` of the table of `row`."""

    row: int
    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: prefill chunks, or one token for each of `rows`.

    seq_ids, rows: parallel, one entry per sequence; in a decode step the longest context first.
    chunks: parallel to `rows` in a prefill step, empty in a decode step.
    growth: blocks that decode rows got for this step.
    max_context_len: longest context, this step's tokens included; a bound known to the host.
    """

    seq_ids: list[int]
    rows: list[int]
    chunks: list[PrefillChunk]
    growth: list[BlockGrowth]
    max_context_len: int

    @property
    def is_prefill(self) -> bool:
        return bool(self.chunks)

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose K/V this step computes."""
        if self.is_prefill:
            return sum(len(chunk.token_ids) for chunk in self.chunks)
        return len(self.rows)

    @property
    def sampled_seq_ids(self) -> list[int]:
        """The sequences that get a token from this step, in the order of the step's ids."""
        if not self.is_prefill:
            return self.seq_ids
        return [i for i, chunk in zip(self.seq_ids, self.chunks, strict=True) if chunk.is_last]


class StepHandle(Protocol):
    """A step that has been launched and may not have ended yet."""

    def token_ids(self) -> list[int]:
        """Waits for the step; returns one id for each of the batch's `sampled_seq_ids`."""
        ...
