"""What `LLM.generate`, `LLM.chat` and `LLM.stream` return: plain dicts."""

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "abort"]
Logprobs = dict[int, float]  # id -> log probability: the token itself, then the most likely ids


class RequestTimes(TypedDict):
    """Seconds since a request was added.

    queued: until a step first computed some of its prompt.
    first_token: until its first token was read.
    total: until it ended.
    """

    queued: float
    first_token: float
    total: float


class _Optional(TypedDict, total=False):
    """What a result has only if it failed, or if its `SamplingParams` or the engine's keywords ask.

    error: why it failed, if its logits were NaN or infinite.

    logprobs: one dict for each completion token.
    prompt_logprobs: one dict for each prompt token, None for the first.
    metrics: with `request_metrics=True`.
    """

    error: str
    logprobs: list[Logprobs]
    prompt_logprobs: list[Logprobs | None]
    metrics: RequestTimes


class CompletionOutput(_Optional):
    """One completion of a prompt.

    text: the completion; empty if the checkpoint has no tokenizer, or with `detokenize=False`.
    token_ids: the completion only. A stop token is part of it, as are the tokens of a stop string.
    finish_reason: "stop" (a stop token or stop string), "length" (`max_tokens` or `max_model_len`),
        or "abort" (see `error`).
    stop_reason: the stop string, or the one of `stop_token_ids`, that ended it; else None.
    prompt_token_ids: the ids that were completed.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_token_ids: list[int]


class RequestOutput(CompletionOutput, total=False):
    """The result for one prompt.

    outputs: with n > 1 all n completions, of which the first is also the result itself.
    """

    outputs: list[CompletionOutput]


class _Sample(TypedDict, total=False):
    sample: int


class StreamOutput(_Sample):
    """What steps have added to one completion.

    index: the index of the prompt.
    sample: with n > 1 the index of the completion among those of its prompt.
    text, token_ids: new since the last such dict; the text may lag behind the ids.
    finish_reason: None until the last such dict of the completion.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
