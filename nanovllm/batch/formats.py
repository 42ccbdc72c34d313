"""Tells which format the rows of a job have."""

from collections.abc import Callable
from functools import cache

from nanovllm.batch.files import BadRow, Row, is_parquet
from nanovllm.batch.openai_format import OpenAIRows, is_openai
from nanovllm.batch.options import Options
from nanovllm.batch.requests import Format, PlainRows, SamplingDefaults
from nanovllm.engine.tokenizer import load_tokenizer


def format_of(first: Row | BadRow, options: Options) -> Format:
    """Returns the format of a job whose first row is given.

    Raises `ValueError` if a column of that row has the name of a result.
    """
    defaults = SamplingDefaults(options.sampling, options.seed)
    if isinstance(first, dict) and is_openai(first):
        return OpenAIRows(defaults, _token_text(options.engine["model"]))
    plain = PlainRows(
        defaults,
        prompt_column=options.prompt_column,
        messages_column=options.messages_column,
        result_prefix=options.result_prefix,
        whole_row=not is_parquet(options.output),  # whose rows are joined to the results later
    )
    if isinstance(first, dict):
        plain.check(first)
    return plain


def _token_text(model: str) -> Callable[[int], str]:
    """Returns what makes text of a token id, with a tokenizer that is loaded when it is needed."""
    tokenizer = cache(lambda: load_tokenizer(model))

    def token_text(token_id: int) -> str:
        return str(token_id) if (t := tokenizer()) is None else str(t.decode([token_id]))

    return token_text
