"""One request and its counters.

Computed tokens chase known tokens: scheduling a step advances `num_computed_tokens` (and
`num_tokens` where the step samples), completing it appends the id to `token_ids`. Between the two
`num_tokens` is ahead of `len(token_ids)`.
"""

import copy
from array import array
from typing import TYPE_CHECKING

from nanovllm.engine.seeds import request_seed, sample_seed
from nanovllm.outputs import FinishReason, Logprobs, RequestTimes
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.completion_text import CompletionText

# Of all that wait, which so hold no objects of their own: replaced, never appended to.
NO_BLOCKS: list[int] = []
NO_SAMPLES: "list[Sequence]" = []


class Sequence:
    """The tokens, blocks and progress of a request, or of one of its samples if it wants several.

    seq_id: a number that is unique in its engine and rises with submission; `sample` more than the
        request's own.
    sample: its index among the samples of its request.
    outbox: where the engine puts it, by its id, when it ends; all of a caller's share it.
    others: in sample 0, the other samples once the prompt has been scheduled; till then none.
    token_ids: prompt and completion as far as known; takes over `prompt_token_ids`. An array("q"),
        not a list: the garbage collector would visit every id of every waiting prompt, again and
        again. For its sake too, a waiting sequence holds no other object of its own.
    num_tokens: known tokens plus those that launched steps will sample: at most two, none while it
        waits.
    num_computed_tokens: leading tokens whose K/V is, or with the launched steps will be, cached.
    sampling_params: the caller's own object, which all prompts of a call may share.
    has_own_stops: whether the request names what ends it: strings or tokens.
    max_num_tokens: prompt and completion never exceed this.
    seed: 64 bits that key the sampling noise.
    row: index in the runner's per-row state while resident, else None.
    block_table: ids of the K/V blocks of its tokens, in order; `NO_BLOCKS` unless resident.
    block_hashes: hash chain of the leading full blocks of `token_ids`, extended on demand.
    num_published_blocks: leading blocks of `block_table` that the prefix cache knows.
    text: the completion as text, kept only for the sake of stop strings.
    finish_reason: why it has ended; None before.
    error: where and why it failed, if its logits were no numbers.
    logprobs: for each token of the completion its log probability and those of the most likely ids;
        None unless asked for.
    prompt_logprobs: the same for each token of the prompt, None for the first; as far as computed.
    stop_reason: the stop string, or the request's own stop token, that ended it.
    times: how long it took, once it has ended, if somebody measures that.
    """

    __slots__ = (
        "block_hashes", "block_table", "error", "finish_reason", "has_own_stops", "logprobs",
        "max_num_tokens", "num_computed_tokens", "num_prompt_tokens", "num_published_blocks",
        "num_tokens", "others", "outbox", "prompt_logprobs", "row", "sample", "sampling_params",
        "seed", "seq_id", "stop_reason", "text", "times", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: "array[int]",
        sampling_params: SamplingParams,
        *,
        max_model_len: int,
        seed: int,
        outbox: "dict[int, Sequence] | None" = None,
    ) -> None:
        self.seq_id = seq_id
        self.sample = 0
        self.outbox = outbox
        self.others = NO_SAMPLES
        self.token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_num_tokens = min(
            self.num_prompt_tokens + sampling_params.max_tokens, max_model_len
        )
        self.sampling_params = sampling_params
        self.has_own_stops = bool(sampling_params.stop or sampling_params.stop_token_ids)
        self.seed = seed
        self.row: int | None = None
        self.block_table = NO_BLOCKS
        self.block_hashes: tuple[int, ...] = ()
        self.num_published_blocks = 0
        self.text: CompletionText | None = None
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.stop_reason: str | int | None = None
        self.times: RequestTimes | None = None
        is_reported = sampling_params.logprobs is not None
        self.logprobs: list[Logprobs] | None = [] if is_reported else None
        is_reported = sampling_params.prompt_logprobs is not None
        self.prompt_logprobs: list[Logprobs | None] | None = [None] if is_reported else None

    @property
    def request_id(self) -> int:
        """The id of the request, which is that of its first sample."""
        return self.seq_id - self.sample

    @property
    def lacks_samples(self) -> bool:
        """Whether it is the first sample, and the others are still to be made."""
        return self.sampling_params.n > 1 and self.sample == 0 and not self.others

    @property
    def num_samples(self) -> int:
        """How many samples it stands for."""
        return self.sampling_params.n if self.lacks_samples else 1

    def make_others(self) -> "list[Sequence]":
        """Makes the other samples of the request, which wait like requests of their own."""
        params = self.sampling_params
        self.others = [self._other(sample) for sample in range(1, params.n)]
        return self.others

    def _other(self, sample: int) -> "Sequence":
        """Returns another sample of the prompt, with the seed that `sample_seed` says."""
        other = copy.copy(self)
        other.seq_id += sample
        other.sample = sample
        other.others = NO_SAMPLES
        other.token_ids = self.token_ids[:]
        other.logprobs = None if self.logprobs is None else []
        other.prompt_logprobs = None  # those of the first sample are those of all
        own = self.sampling_params.seed
        if own is None:
            other.seed = sample_seed(self.seed, sample)
        else:
            other.seed = request_seed(sample_seed(own, sample), 0, 0)
        other.restart()
        return other

    def restart(self) -> None:
        """Forgets row and blocks: all its tokens are to be computed afresh."""
        self.row = None
        self.block_table = NO_BLOCKS
        self.num_published_blocks = 0
        self.num_computed_tokens = 0
        self.num_tokens = len(self.token_ids)

    def recover(self) -> None:
        """Starts afresh even where the completion of a step was cut short.

        A token without its log probability is dropped: sampled again, it is the same.
        """
        if self.logprobs is not None:
            num_kept = min(len(self.logprobs), len(self.token_ids) - self.num_prompt_tokens)
            del self.logprobs[num_kept:], self.token_ids[self.num_prompt_tokens + num_kept :]
        self.restart()

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()
