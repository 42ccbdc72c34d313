"""Turns what a user calls a prompt into checked token ids.

A prompt is a text; or its token ids, as a list, a tuple, or a NumPy array or torch tensor of
integers; or a dict that holds either. Errors name the prompt as the caller calls it.
"""

from array import array
from collections.abc import Mapping
from contextlib import suppress
from numbers import Number
from typing import Any, TypedDict

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nanovllm.engine.tokenizer import encode
from nanovllm.utils.shown import shown


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: "TokenIds"


TokenIds = list[int] | tuple[int, ...] | np.ndarray | torch.Tensor
Prompt = str | TokenIds | TextPrompt | TokensPrompt

_KEYS = ("prompt", "prompt_token_ids")


def as_batch(prompts: Any) -> list[Any]:
    """Returns the prompts that `prompts` holds, or is."""
    is_text_or_ids = isinstance(prompts, str | np.ndarray | torch.Tensor)
    if is_text_or_ids or (isinstance(prompts, Mapping) and any(key in prompts for key in _KEYS)):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise TypeError(
            f"prompts must be a list of prompts, or one prompt (a str, token ids, or a dict with "
            f"'prompt' or 'prompt_token_ids'), got {shown(prompts)}"
        )
    return [prompts] if prompts and isinstance(prompts[0], Number) else list(prompts)


class PromptReader:
    """Reads prompts for one model.

    tokenizer: None if the checkpoint has none; then texts are refused.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def token_ids(self, prompt: Any, what: str) -> "array[int]":
        """Returns the prompt as token ids; errors about it call it `what`."""
        given = self._given(prompt, what)
        if isinstance(given, str):
            given = self._encoded(given, what)
        elif isinstance(given, np.ndarray | torch.Tensor):
            given = _ids_of_array(given, what)
        elif not isinstance(given, list | tuple):
            raise TypeError(f"{what} must be a str or a list of token ids, got {shown(given)}")
        if not given:
            raise ValueError(f"{what} is empty; it needs at least one token")
        if len(given) >= self._max_model_len:
            raise ValueError(
                f"{what} has {len(given)} tokens, which leaves no room for a completion within "
                f"max_model_len={self._max_model_len}; shorten it or raise max_model_len"
            )
        return self._checked(given, what)

    def _given(self, prompt: Any, what: str) -> Any:
        """Returns what a dict holds; any other prompt as it is."""
        if not isinstance(prompt, Mapping):
            return prompt
        if len(prompt) != 1 or not any(key in prompt for key in _KEYS):
            raise TypeError(
                f"{what} must be a str or a list of token ids, or a dict with either 'prompt' or "
                f"'prompt_token_ids', got {shown(prompt)}"
            )
        ((key, given),) = prompt.items()
        if isinstance(given, str) != (key == "prompt") or isinstance(given, Mapping):
            kind = "a str" if key == "prompt" else "a list of token ids"
            raise TypeError(f"{what} must have {kind} as {key!r}, got {shown(given)}")
        return given

    def _encoded(self, text: str, what: str) -> list[int]:
        """Returns the ids of a text, with the special tokens that the tokenizer adds.

        A text that begins with the beginning-of-sequence token does not get it twice.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError(f"{what} is text, but {self._model} has no tokenizer; pass token ids")
        check_text(text, what)
        token_ids = encode(tokenizer, text, what)
        bos = tokenizer.bos_token
        if bos and text.startswith(bos) and token_ids[:2] == [tokenizer.bos_token_id] * 2:
            plain = encode(tokenizer, text, what, add_special_tokens=False)
            if len(plain) < len(token_ids):
                return token_ids[1:]
        return token_ids

    def _checked(self, token_ids: "list[int] | tuple[int, ...]", what: str) -> "array[int]":
        """Returns a copy of ids that are all in the model's vocabulary."""
        if set(map(type, token_ids)) == {int}:  # C speed: most prompts need no loop
            with suppress(OverflowError):  # the loop names the id
                copied = array("q", token_ids)
                # As unsigned numbers, negative ids are large.
                if np.frombuffer(copied, np.uint64).max() < self._vocab_size:
                    return copied
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TypeError(
                    f"{what} has {shown(token_id)} at index {index}; token ids are ints"
                )
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"{what} has token id {shown(token_id)} at index {index}; the model's "
                    f"vocabulary has ids 0 to {self._vocab_size - 1}"
                )
        return array("q", token_ids)


def check_text(text: str, what: str) -> None:
    """Raises `ValueError` for a text that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has {text[error.start]!r}, half of a surrogate pair, at index {error.start}; "
            "it is no character"
        ) from None


def _ids_of_array(ids: np.ndarray | torch.Tensor, what: str) -> list[int]:
    shape = tuple(ids.shape)
    if len(shape) != 1:
        raise ValueError(f"{what} has the shape {shape}; token ids are one-dimensional")
    if isinstance(ids, torch.Tensor):
        is_integral = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    else:
        is_integral = ids.dtype.kind in "iu"
    if not is_integral and shape[0]:
        raise TypeError(f"{what} must have integers as token ids, got {ids.dtype}")
    listed: list[int] = ids.tolist()
    return listed
