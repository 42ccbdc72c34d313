"""What a row asks for, and how it is answered: the plain format."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import xxhash

from nanovllm.batch.files import BadRow, Row
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

RESULT_NAMES = ("text", "token_ids", "finish_reason", "error")
OPTIONAL_NAMES = ("outputs", "logprobs", "prompt_logprobs")
_KEYWORDS = [field.name for field in fields(SamplingParams)]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, or a conversation and what `LLM.chat` takes with it, and its sampling."""

    sampling_params: SamplingParams
    prompt: Any = None
    messages: Any = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class Format(Protocol):
    """A way to write requests and results as rows."""

    def request(self, index: int, row: Row) -> Request:
        """Reads a row; raises `ValueError` or `TypeError` with what is wrong about it."""
        ...

    def result(self, index: int, row: Row, output: RequestOutput) -> Row:
        """Returns the output row of a request that was served."""
        ...

    def error(self, index: int, row: Row | BadRow, reason: str) -> Row:
        """Returns the output row of one that was not."""
        ...


class SamplingDefaults:
    """Makes the sampling parameters of rows.

    given: keywords of `SamplingParams` for all rows.
    seed: with the number of a row it keys the sampling of rows without a seed of their own, so
        that a row gets the same text whenever and wherever it is served; None leaves it to the
        engine.
    """

    def __init__(self, given: Mapping[str, Any], seed: int | None) -> None:
        self.given = given
        self._seed = seed

    def params(self, index: int, own: Mapping[str, Any]) -> SamplingParams:
        """Returns the parameters of row `index`, whose own keywords override the others."""
        for name in own:
            if name not in _KEYWORDS:
                near = difflib.get_close_matches(name, _KEYWORDS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_KEYWORDS)}"
                raise TypeError(f"sampling_params has an unknown keyword {name!r}; {hint}")
        values = {**self.given, **own}
        if values.get("seed") is None and self._seed is not None:
            key = self._seed.to_bytes(8, "little") + index.to_bytes(8, "little")
            values["seed"] = xxhash.xxh64_intdigest(key)
        return SamplingParams(**values)


class PlainRows:
    """Rows with a prompt or messages; the result is added to the row.

    prompt_column, messages_column: as in `Options`.
    whole_row: whether an output row contains the input row.
    """

    def __init__(
        self,
        defaults: SamplingDefaults,
        *,
        prompt_column: str | None = None,
        messages_column: str | None = None,
        result_prefix: str = "",
        whole_row: bool = True,
    ) -> None:
        is_default = prompt_column is None and messages_column is None
        self._defaults = defaults
        self._prompt = "prompt" if is_default else prompt_column
        self._messages = "messages" if is_default else messages_column
        self._prefix = result_prefix
        self._whole_row = whole_row

    def check(self, row: Row) -> None:
        """Raises `ValueError` if the names of result columns are taken in a row."""
        for name in (*RESULT_NAMES, *OPTIONAL_NAMES):
            if self._prefix + name in row:
                raise ValueError(
                    f"the row has a column {self._prefix + name!r}, which the result would "
                    "replace; choose another name with --result-prefix"
                )

    def request(self, index: int, row: Row) -> Request:
        self.check(row)
        own = row.get("sampling_params")
        if isinstance(own, str):
            own = json.loads(own)
        if own is not None and not isinstance(own, dict):
            raise TypeError(f"sampling_params must be a dict, got {own!r:.200}")
        # Parquet has every field in every row, null where it is not set.
        own = {name: value for name, value in (own or {}).items() if value is not None}
        params = self._defaults.params(index, own)
        prompt, messages = (
            None if name is None else row.get(name) for name in (self._prompt, self._messages)
        )
        if prompt is not None and messages is not None:
            raise ValueError(
                f"the row has {self._prompt!r} and {self._messages!r}; choose one with "
                "--prompt-column or --messages-column"
            )
        if prompt is None and messages is None:
            names = " nor ".join(repr(name) for name in (self._prompt, self._messages) if name)
            raise ValueError(f"the row has no {names}")
        return Request(params, prompt, messages)

    def result(self, index: int, row: Row, output: RequestOutput) -> Row:
        result: dict[str, Any] = dict(output)
        names = [name for name in (*RESULT_NAMES, *OPTIONAL_NAMES) if name in result]
        added = {self._prefix + name: result[name] for name in names}
        if "outputs" in result:
            added[self._prefix + "outputs"] = [
                {name: sample[name] for name in names if name in sample}
                for sample in result["outputs"]
            ]
        return self._joined(row, added)

    def error(self, index: int, row: Row | BadRow, reason: str) -> Row:
        return self._joined(row, {self._prefix + "error": reason})

    def _joined(self, row: Row | BadRow, added: Row) -> Row:
        return row | added if self._whole_row and isinstance(row, dict) else added
