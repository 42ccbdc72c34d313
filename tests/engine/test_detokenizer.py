"""Tests that text made token by token is the tokenizer's own, whatever the tokens."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.detokenizer import TextDecoder
from tests.helpers.texts import (
    ADDED,
    SPECIAL,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    texts,
    wordpiece_tokenizer,
)

KINDS = {
    "byte level": byte_level_tokenizer,
    "sentencepiece": lambda: sentencepiece_tokenizer(1),
    "sentencepiece that cuts two spaces": lambda: sentencepiece_tokenizer(2),
    "sentencepiece that cuts none": lambda: sentencepiece_tokenizer(0),
    "word pieces": wordpiece_tokenizer,
}


@cache
def decoder_of(kind: str) -> TextDecoder:
    return TextDecoder(KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skips=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_what_the_tokenizer_decodes(
    kind: str, data: st.DataObject, skips: bool
) -> None:
    decoder = decoder_of(kind)
    tokenizer = decoder.tokenizer
    size = len(tokenizer)
    any_id = st.integers(0, size + 2)  # a model's vocabulary may be larger than the tokenizer's
    encoded = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    parts = data.draw(st.lists(st.lists(any_id, max_size=4) | encoded, max_size=6))
    token_ids = [token_id for part in parts for token_id in part]
    detokenizer, text = decoder.detokenizer(skips), ""
    for number, token_id in enumerate(token_ids, 1):
        text += detokenizer.push(token_id)
        so_far = tokenizer.decode(token_ids[:number], skip_special_tokens=skips)
        assert text + detokenizer.rest() == so_far == decoder.decode(token_ids[:number], skips)
        assert so_far.startswith(text + detokenizer.tentative())
        if kind != "word pieces":  # which may lose the space before a full stop, for instance
            whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
            assert whole.startswith(text), "final text has changed"


def test_a_character_comes_whole() -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer = TextDecoder(tokenizer).detokenizer(skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode("a🙂é")]
    assert pieces == ["a", "", "", "", "🙂", "", "é"]


def test_a_run_of_bytes_waits_for_its_end() -> None:
    """One wrong byte turns all others of its run into replacement characters."""
    tokenizer = sentencepiece_tokenizer(1)
    smile = list("🙂".encode())
    b = tokenizer.convert_tokens_to_ids("b")
    detokenizer = TextDecoder(tokenizer).detokenizer(skip_special_tokens=False)
    assert [detokenizer.push(token_id) for token_id in [*smile, b]] == ["", "", "", "", "🙂b"]
    assert [detokenizer.push(token_id) for token_id in [*smile, 0xFF]] == [""] * 5
    assert (detokenizer.tentative(), detokenizer.rest()) == ("", "\ufffd" * 5)


def test_special_tokens_are_skipped_and_added_ones_are_not() -> None:
    tokenizer = byte_level_tokenizer()
    special, added = tokenizer.convert_tokens_to_ids([SPECIAL, ADDED])
    for skips, expected in ((True, [ADDED, ""]), (False, [ADDED, SPECIAL])):
        detokenizer = TextDecoder(tokenizer).detokenizer(skips)
        assert [detokenizer.push(token_id) for token_id in (added, special)] == expected


def test_a_tokenizer_that_takes_spaces_out_is_decoded_as_a_whole() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    # Newer transformers obey the setting above for BPE only together with this one.
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    token_ids = tokenizer.encode("no . 5 ' s", add_special_tokens=False)
    detokenizer = TextDecoder(tokenizer).detokenizer(skip_special_tokens=False)
    assert {detokenizer.push(token_id) for token_id in token_ids} == {""}
    assert detokenizer.rest() == tokenizer.decode(token_ids) != "no . 5 ' s"
