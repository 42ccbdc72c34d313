"""What `LLM.generate` returns for one prompt."""

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length"]


class RequestOutput(TypedDict):
    """The result of one request.

    text: the completion, special tokens included; empty if the checkpoint has no tokenizer.
    token_ids: the completion only; ends with the stop token if one ended the request.
    finish_reason: "stop" (a stop token) or "length" (`max_tokens` or `max_model_len`).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
