"""What the runner is told of a sequence that gets a row."""

from collections.abc import Collection

from nanovllm.engine.batch import RowHistory, RowInit
from nanovllm.engine.sequence import Sequence


def row_init(seq: Sequence, eos_token_ids: Collection[int]) -> RowInit:
    """Returns what starts the row of an admitted sequence.

    eos_token_ids: the ids that end a sequence unless it ignores them.
    """
    table, history = list(seq.block_table), _history(seq, eos_token_ids)
    return RowInit(seq.sampling_params, seq.seed, table, history)


def _history(seq: Sequence, eos_token_ids: Collection[int]) -> RowHistory | None:
    """Returns what the row needs to know of its tokens, None if it is sampled plainly."""
    params = seq.sampling_params
    if params.is_plain:
        return None
    needs_tokens = params.has_penalties or params.prompt_logprobs is not None
    return RowHistory(
        seq.num_prompt_tokens,
        seq.token_ids[:] if needs_tokens else seq.token_ids[:0],
        params.ending_ids(eos_token_ids) if params.min_tokens else frozenset(),
    )
