"""OpenAI's batch file format: chat and text completions as lines, answered line by line.

See https://platform.openai.com/docs/guides/batch. Fields of a body that change nothing here, such
as `user`, are ignored; those that ask for what there is not are an error of that line.
"""

import time
from collections.abc import Callable
from typing import Any

from nanovllm.batch.files import BadRow, Row
from nanovllm.batch.requests import Request, SamplingDefaults
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FIELDS = ("custom_id", "method", "url", "body")
UNLIMITED = 2**31  # tokens: the model's limit comes first
# Fields of a body that mean what the keyword of SamplingParams of the same name means, OpenAI's and
# those that other engines have added.
SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop",
    "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "logit_bias",
)  # fmt: skip
OTHER_FIELDS = (
    "model", "messages", "prompt", "tools", "logprobs", "top_logprobs", "max_completion_tokens",
    "chat_template_kwargs", "user", "metadata", "store", "service_tier", "parallel_tool_calls",
)  # fmt: skip
# What may be present as long as it asks for nothing.
NEUTRAL = {
    "stream": (False, None),
    "echo": (False, None),
    "suffix": ("", None),
    "best_of": (1, None),
    "response_format": ({"type": "text"}, None),
    "tool_choice": ("auto", "none", None),
    "stream_options": (None,),
}


def is_openai(row: Row) -> bool:
    """Tells a line of a batch file from a plain row."""
    return all(name in row for name in FIELDS)


class OpenAIRows:
    """Lines of a batch file.

    token_text: returns the text of one token id, for log probabilities.
    """

    def __init__(self, defaults: SamplingDefaults, token_text: Callable[[int], str]) -> None:
        self._defaults = defaults
        self._token_text = token_text

    def request(self, index: int, row: Row) -> Request:
        url, body = row.get("url"), row.get("body")
        if url not in (CHAT, COMPLETIONS) or row.get("method") != "POST":
            raise ValueError(
                f"method and url must be POST and {CHAT} or {COMPLETIONS}, "
                f"got {row.get('method')!r} and {url!r}"
            )
        if not isinstance(body, dict):
            raise TypeError(f"body must be an object, got {body!r}")
        _refuse_unknown(body)
        params = self._params(index, url, body)
        if url == COMPLETIONS:
            return Request(params, _required(body, "prompt"))
        return Request(
            params,
            messages=_required(body, "messages"),
            tools=None if body.get("tool_choice") == "none" else body.get("tools"),
            chat_template_kwargs=body.get("chat_template_kwargs") or {},
        )

    def result(self, index: int, row: Row, output: RequestOutput) -> Row:
        samples = output.get("outputs") or [output]
        num_prompt = len(output["prompt_token_ids"])
        num_completion = sum(len(sample["token_ids"]) for sample in samples)
        is_chat = row["url"] == CHAT
        choice = self._chat_choice if is_chat else self._text_choice
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{index}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": row["body"].get("model", ""),
            "choices": [
                {"index": i, **choice(sample), "finish_reason": sample["finish_reason"]}
                for i, sample in enumerate(samples)
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
            },
        }
        return _line(index, row, 200, body, None)

    def error(self, index: int, row: Row | BadRow, reason: str) -> Row:
        error = {"code": "invalid_request", "message": reason}
        body = {"error": {**error, "type": "invalid_request_error", "param": None}}
        return _line(index, row if isinstance(row, dict) else {}, 400, body, error)

    def _params(self, index: int, url: str, body: dict[str, Any]) -> SamplingParams:
        own = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
        if body.get("max_completion_tokens") is not None:
            own["max_tokens"] = body["max_completion_tokens"]
        if "max_tokens" not in own and "max_tokens" not in self._defaults.given:
            own["max_tokens"] = UNLIMITED if url == CHAT else 16  # as in the original
        if "logit_bias" in own:  # keys of JSON objects are text
            own["logit_bias"] = {int(key): bias for key, bias in own["logit_bias"].items()}
        if url == COMPLETIONS:
            own["logprobs"] = body.get("logprobs")
        elif body.get("logprobs"):
            own["logprobs"] = body.get("top_logprobs") or 0
        return self._defaults.params(index, own)

    def _chat_choice(self, sample: Any) -> Row:
        choice: Row = {
            "message": {"role": "assistant", "content": sample["text"]},
            "logprobs": None,
        }
        if "logprobs" in sample:
            choice["logprobs"] = {
                "content": [self._chat_token(best) for best in sample["logprobs"]]
            }
        return choice

    def _chat_token(self, best: dict[int, float]) -> Row:
        """Returns one token with its alternatives; the sampled id comes first in `best`."""
        tokens: list[Row] = []
        for token_id, logprob in best.items():
            text = self._token_text(token_id)
            tokens.append({"token": text, "logprob": logprob, "bytes": list(text.encode())})
        most_likely = sorted(tokens[1:], key=lambda token: -token["logprob"])
        return tokens[0] | {"top_logprobs": most_likely}

    def _text_choice(self, sample: Any) -> Row:
        choice: Row = {"text": sample["text"], "logprobs": None}
        if "logprobs" in sample:
            texts = [
                {self._token_text(i): p for i, p in best.items()} for best in sample["logprobs"]
            ]
            choice["logprobs"] = {
                "tokens": [next(iter(best)) for best in texts],
                "token_logprobs": [next(iter(best.values())) for best in texts],
                "top_logprobs": texts,
            }
        return choice


def _refuse_unknown(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in SAMPLING_FIELDS or name in OTHER_FIELDS:
            continue
        if name not in NEUTRAL:
            raise ValueError(f"the body has an unknown field {name!r}")
        if value not in NEUTRAL[name]:
            raise ValueError(f"{name}={value!r} is not supported")


def _required(body: dict[str, Any], name: str) -> Any:
    if body.get(name) is None:
        raise ValueError(f"the body has no {name!r}")
    return body[name]


def _line(index: int, row: Row, status: int, body: Row, error: Row | None) -> Row:
    return {
        "id": f"batch_req_{index}",
        "custom_id": row.get("custom_id"),
        "response": {"status_code": status, "request_id": f"req_{index}", "body": body},
        "error": error,
    }
