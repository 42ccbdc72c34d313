"""One request and its counters.

Computed tokens chase known tokens: scheduling a step advances `num_computed_tokens` (and
`num_tokens` where the step samples), completing it appends the id to `token_ids`. Between the two
`num_tokens` is ahead of `len(token_ids)`.
"""

from array import array

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

Logprobs = dict[int, float]  # by token id: the token's own first, then the most likely ones
NO_BLOCKS: list[int] = []  # the table of all that wait: replaced on admission, never appended to


class Sequence:
    """A request's tokens, blocks and progress.

    seq_id: a number that is unique in its engine and rises with submission.
    token_ids: prompt and completion as far as known; takes over `prompt_token_ids`. An array("q"),
        not a list: the garbage collector would visit every id of every waiting prompt, again and
        again. For its sake too, a waiting sequence holds no other object of its own.
    num_tokens: known tokens plus those that launched steps will sample: at most two, none while it
        waits.
    num_computed_tokens: leading tokens whose K/V is, or with the launched steps will be, cached.
    sampling_params: the caller's own object, which all prompts of a call may share.
    max_num_tokens: prompt and completion never exceed this.
    seed: 64 bits that key the sampling noise.
    row: index in the runner's per-row state while resident, else None.
    block_table: ids of the K/V blocks of its tokens, in order; `NO_BLOCKS` unless resident.
    block_hashes: hash chain of the leading full blocks of `token_ids`, extended on demand.
    num_published_blocks: leading blocks of `block_table` that the prefix cache knows.
    finish_reason: why it has ended; None before.
    logprobs: for each token of the completion its log probability and those of the most likely ids;
        None unless asked for.
    prompt_logprobs: the same for each token of the prompt, None for the first; as far as computed.
    """

    __slots__ = (
        "block_hashes", "block_table", "finish_reason", "logprobs", "max_num_tokens",
        "num_computed_tokens", "num_prompt_tokens", "num_published_blocks", "num_tokens",
        "prompt_logprobs", "row", "sampling_params", "seed", "seq_id", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: "array[int]",
        sampling_params: SamplingParams,
        *,
        max_model_len: int,
        seed: int,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_num_tokens = min(
            self.num_prompt_tokens + sampling_params.max_tokens, max_model_len
        )
        self.sampling_params = sampling_params
        self.seed = seed
        self.row: int | None = None
        self.block_table = NO_BLOCKS
        self.block_hashes: tuple[int, ...] = ()
        self.num_published_blocks = 0
        self.finish_reason: FinishReason | None = None
        is_reported = sampling_params.logprobs is not None
        self.logprobs: list[Logprobs] | None = [] if is_reported else None
        is_reported = sampling_params.prompt_logprobs is not None
        self.prompt_logprobs: list[Logprobs | None] | None = [None] if is_reported else None

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()
