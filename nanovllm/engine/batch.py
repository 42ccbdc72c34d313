"""The contract between scheduler and runner: what one step computes, and how its ids come back.

A `ScheduledBatch` is plain data (small, picklable, no torch). It holds only what the runner does
not know yet: the runner keeps each row's block table, last token and length itself. So prefill
carries the scheduled slices of prompts, and decode little more than its rows.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.engine.shared_prefix import PrefixGroup
from nanovllm.outputs import Logprobs
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What a row that is more than plainly sampled needs to know of its sequence.

    num_prompt_tokens: leading tokens that belong to the prompt.
    token_ids: all known tokens, if penalties or log probabilities of the prompt depend on them.
    late_ids: ids that may be drawn only after `min_tokens` others.
    """

    num_prompt_tokens: int
    token_ids: "array[int]"
    late_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class RowInit:
    """What starts a row for a newly admitted sequence; whatever the row held before is void.

    sampling_params: the caller's own object.
    seed: 64 bits that key the row's sampling noise.
    block_table: the blocks of all known tokens of the sequence.
    history: None if `sampling_params` are plain.
    """

    sampling_params: SamplingParams
    seed: int
    block_table: list[int]
    history: RowHistory | None = None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The part of one sequence that a step prefills.

    start: position of `token_ids[0]`; the tokens before it are cached.
    is_last: the chunk ends at the sequence's last known token, so the next token is sampled.
    is_cached: the chunk is that one token, and even its K/V is in the cache, in a block that others
        may read: it is computed for the sake of the next token, and not stored.
    init: set on the first chunk after admission.
    """

    start: int
    token_ids: "array[int] | list[int]"
    is_last: bool
    is_cached: bool
    init: RowInit | None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The K/V of the first `num_tokens` tokens of one block goes to another one, once the step has
    computed it."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Another sample of a prompt that ends in the step: its first token comes from the same logits.

    Its block table begins with the prompt's full blocks.

    chunk: index of the prompt's last chunk.
    copied: the block behind these, if the prompt fills it in part: the sample has a copy of it.
    """

    chunk: int
    seq_id: int
    row: int
    init: RowInit
    copied: BlockCopy | None


@dataclass(frozen=True, slots=True)
class BlockGrowth:
    """A new entry of a block table: `block_id` becomes entry `index` of the table of `row`."""

    row: int
    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class DecodePart:
    """One token for each of some running sequences.

    seq_ids, rows: parallel, one entry per sequence, the longest context first.
    growth: blocks that the rows got for this step.
    max_context_len: longest context, this step's tokens included; a bound known to the host.
    prefix_groups: those of the sequences that share leading blocks, if it pays to read these once.
    """

    seq_ids: list[int]
    rows: list[int]
    growth: list[BlockGrowth]
    max_context_len: int
    prefix_groups: list[PrefixGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Chunks of prompts.

    seq_ids, rows, chunks: parallel, one entry per sequence.
    max_context_len: longest context, this step's tokens included.
    forks: further samples of prompts that end in this step.
    """

    seq_ids: list[int]
    rows: list[int]
    chunks: list[PrefillChunk]
    max_context_len: int
    forks: list[Fork] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def sampled_rows(self) -> list[int]:
        """The rows that get a token: those whose prompt ends in this step, then the forks."""
        pairs = zip(self.rows, self.chunks, strict=True)
        return [row for row, chunk in pairs if chunk.is_last] + [fork.row for fork in self.forks]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: decode, prefill, or both, in this order; never neither. No sequence is in both."""

    decode: DecodePart | None = None
    prefill: PrefillPart | None = None

    @property
    def num_decoded(self) -> int:
        """The number of sequences that decode."""
        return len(self.decode.rows) if self.decode else 0

    @property
    def num_prefilled(self) -> int:
        """The number of prompt tokens that are computed."""
        return self.prefill.num_tokens if self.prefill else 0

    @property
    def sampled_seq_ids(self) -> list[int]:
        """The sequences that get a token from this step, in the order of the step's ids."""
        seq_ids = list(self.decode.seq_ids) if self.decode else []
        if self.prefill:
            pairs = zip(self.prefill.seq_ids, self.prefill.chunks, strict=True)
            seq_ids += [seq_id for seq_id, chunk in pairs if chunk.is_last]
            seq_ids += [fork.seq_id for fork in self.prefill.forks]
        return seq_ids


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The log probabilities that a step reports, by sequence id; only of those that want them.

    sampled: those of the token that the step has sampled.
    prompts: those of each prompt token that follows one of the sequence's chunk, in order.
    """

    sampled: Mapping[int, Logprobs] = field(default_factory=dict)
    prompts: Mapping[int, list[Logprobs]] = field(default_factory=dict)


class StepHandle(Protocol):
    """A step that has been launched and may not have ended yet."""

    def token_ids(self) -> list[int]:
        """Waits for the step; returns one id for each of the batch's `sampled_seq_ids`, -1 where
        the logits were NaN or infinite."""
        ...

    def logprobs(self) -> StepLogprobs:
        """Returns what the step reports, once `token_ids` has returned."""
        ...
