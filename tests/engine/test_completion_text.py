"""Tests the text of a growing completion: stop strings, and what may be shown before the end."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nanovllm.engine.completion_text import CompletionText
from nanovllm.engine.detokenizer import TextDecoder
from tests.helpers.texts import (
    byte_level_tokenizer,
    certain_text,
    first_stop,
    sentencepiece_tokenizer,
    texts,
)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@cache
def byte_ids() -> dict[int, int]:
    """Returns the token id of each byte that UTF-8 has."""
    sample = "".join(map(chr, [*range(0x800), *range(0x800, 0x110000, 0x800)]))
    sample = sample.encode("utf-8", "ignore").decode()  # without surrogates
    return dict(zip(sample.encode(), byte_level().encode(sample), strict=True))


def run(
    tokenizer: PreTrainedTokenizerFast,
    token_ids: list[int],
    stop: tuple[str, ...],
    min_tokens: int = 0,
    includes_stop: bool = False,
) -> tuple[int, str | None, list[str]]:
    """Returns how many ids were taken, the stop string that ended it, and the text in pieces."""
    detokenizer = TextDecoder(tokenizer).detokenizer(skip_special_tokens=False)
    text, pieces = CompletionText(detokenizer, stop, includes_stop), []
    found = None
    for token_id in token_ids:
        found = text.push(token_id, text.num_tokens + 1 >= min_tokens)
        if found is not None:
            break
        pieces.append(text.take())
    return text.num_tokens, found, [*pieces, text.finish()]


@given(data=st.data(), min_tokens=st.integers(0, 12), includes_stop=st.booleans())
@settings(max_examples=300, deadline=None)
def test_stop_strings_are_found_as_by_brute_force(
    data: st.DataObject, min_tokens: int, includes_stop: bool
) -> None:
    raw = "".join(data.draw(st.lists(texts, min_size=1, max_size=3))).encode()
    raw += bytes(data.draw(st.lists(st.sampled_from([*byte_ids()]), max_size=3)))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    whole = raw.decode("utf-8", "replace")
    spans = st.tuples(st.integers(0, len(whole)), st.integers(1, 6))
    within = spans.map(lambda span: whole[span[0] : sum(span)]).filter(bool)
    stop = tuple(data.draw(st.lists(within | st.text("ab s", min_size=1, max_size=3), max_size=3)))
    token_ids = [byte_ids()[byte] for byte in raw]
    certain = [certain_text(raw[:number]) for number in range(len(raw) + 1)]

    num_tokens, found, pieces = run(byte_level(), token_ids, stop, min_tokens, includes_stop)
    expected = first_stop(certain, stop, min_tokens)
    if expected is None:
        assert (num_tokens, found, "".join(pieces)) == (len(raw), None, whole)
    else:
        end, start, string = expected
        text = certain[end][: start + len(string) * includes_stop]
        assert (num_tokens, found, "".join(pieces)) == (end, string, text)


CASES = {
    "spans tokens": (["a", "b", "cd", "e"], ("bcd",), 3, "a"),
    "lies inside one": (["a", "xstopy", "e"], ("stop",), 2, "ax"),
    "is the whole text": (["st", "op"], ("stop",), 2, ""),
    "the one that begins first": (["a", "xbcy"], ("cy", "b", "bc"), 2, "ax"),
    "then the first in the list": (["a", "xbcy"], ("bc", "b"), 2, "ax"),
    "overlaps itself": (["aa", "ab"], ("aab",), 2, "a"),
}


@pytest.mark.parametrize("case", CASES)
def test_stop_strings(case: str) -> None:
    words, stop, expected_tokens, expected_text = CASES[case]
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([word for word in words if len(word) > 1])
    token_ids = [tokenizer.convert_tokens_to_ids(word) for word in words]
    num_tokens, found, pieces = run(tokenizer, token_ids, stop)
    assert (num_tokens, "".join(pieces)) == (expected_tokens, expected_text)
    _, found_too, pieces = run(tokenizer, token_ids, stop, includes_stop=True)
    assert found_too == found in stop
    assert "".join(pieces) == expected_text + str(found)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("one stores two")
    _, _, pieces = run(tokenizer, token_ids, ("stop", " sto!"))
    assert pieces == [*"one", "", "", "", "", " stor", "e", "", "s", " t", "w", "o", ""]


def test_a_stop_string_within_a_run_of_bytes_counts_at_once() -> None:
    tokenizer = sentencepiece_tokenizer(1)
    token_ids = [*"🙂日".encode(), *"🙂".encode()]
    assert run(tokenizer, token_ids, ("日",)) == (7, "日", [*[""] * 6, "🙂"])
    assert run(tokenizer, [*"🙂".encode(), 0xFF, *"日".encode()], ("日",))[1] is None
