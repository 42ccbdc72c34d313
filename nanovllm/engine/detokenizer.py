"""Turns the ids of a completion into text, one id after the other.

A piece of text is final when it is returned, and all pieces together are exactly what the
tokenizer's `decode` makes of all ids. What later ids may change is held back: the first bytes of a
code point and, where tokens stand for single bytes, a whole run of these.
"""

import codecs
import json
import re
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no text
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """The text of one completion so far."""

    def push(self, token_id: int) -> str:
        """Takes the next id; returns the text that has become final by it, maybe none."""
        ...

    def tentative(self) -> str:
        """Returns complete characters that follow as things stand, and that later ids may undo."""
        ...

    def rest(self) -> str:
        """Returns the text that follows if no more ids come."""
        ...


class TextDecoder:
    """Makes text with a checkpoint's tokenizer, from all ids at once or from one after the other.

    The latter takes constant time per id for byte-level BPE, and for the tokens of sentencepiece
    with single bytes among them. For any other tokenizer, and where `decode` takes spaces out
    again, all ids are decoded each time and no text is final before the last.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        decoders = _decoders(tokenizer)
        self._special_ids = _special_ids(tokenizer) if decoders else frozenset()
        self._byte_level = _ByteLevelTokens.of(tokenizer, decoders)
        self._spelled = _SpelledTokens.of(tokenizer, decoders)

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """Returns a detokenizer for one completion."""
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        if self._byte_level is not None:
            return _FromBytes(self._byte_level, skipped)
        if self._spelled is not None:
            return _FromSpelling(self._spelled, skipped)
        return _FromAll(self, skip_special_tokens)


def _decoders(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Returns the steps by which a tokenizer's library decodes; none if more happens to the text,
    or if it is not that library's."""
    if not tokenizer.is_fast:
        return []
    if tokenizer.clean_up_tokenization_spaces:
        ids = tokenizer.encode("a .", add_special_tokens=False)  # some kinds ignore the setting
        if tokenizer.decode(ids) != tokenizer.decode(ids, clean_up_tokenization_spaces=False):
            return []
    backend: Any = tokenizer.backend_tokenizer
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special)


def _alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level token stands for.

    Printable Latin-1 characters stand for themselves, and the characters from 256 on for the other
    bytes in order (Radford et al. 2019, the encoder of GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(256, 256 + len(others))]
    return {chr(c): byte for c, byte in zip(characters, printable + others, strict=True)}


class _ByteLevelTokens:
    """The bytes of byte-level tokens."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._alphabet = _alphabet()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def of(cls, tokenizer: Any, decoders: list[dict[str, Any]]) -> "_ByteLevelTokens | None":
        is_byte_level = [step.get("type") for step in decoders] == ["ByteLevel"]
        return cls(tokenizer.backend_tokenizer) if is_byte_level else None

    def __getitem__(self, token_id: int) -> bytes:
        """Returns a token's bytes, none for an id that the tokenizer lacks."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) or ""
            try:
                found = bytes(self._alphabet[character] for character in token)
            except KeyError:  # an added token, which is written as it is
                found = token.encode()
            self._bytes[token_id] = found
        return found


class _SpelledTokens:
    """The text of sentencepiece's tokens.

    cut: a character that a text loses at its start, up to `num_cut` times.
    """

    def __init__(
        self, backend: Any, replaced: list[tuple[str, str]], strip: dict[str, Any]
    ) -> None:
        self._backend = backend
        self._replaced = replaced
        self._texts: dict[int, str | None] = {}
        self.cut: str = strip["content"]
        self.num_cut: int = strip["start"]

    @classmethod
    def of(cls, tokenizer: Any, decoders: list[dict[str, Any]]) -> "_SpelledTokens | None":
        """Returns None unless the decoders are Replace, if any, ByteFallback, Fuse, and maybe Strip
        at the start."""
        steps, replaced = list(decoders), []
        while steps and steps[0].get("type") == "Replace" and "String" in steps[0]["pattern"]:
            step = steps.pop(0)
            replaced.append((step["pattern"]["String"], step["content"]))
        if [step.get("type") for step in steps[:2]] != ["ByteFallback", "Fuse"]:
            return None
        strip = {"type": "Strip", "content": " ", "start": 0, "stop": 0}
        strip, *more = steps[2:] or [strip]
        if more or strip["type"] != "Strip" or strip["stop"]:
            return None
        return cls(tokenizer.backend_tokenizer, replaced, strip)

    def __getitem__(self, token_id: int) -> str | None:
        """Returns a token's text, None for an id that the tokenizer lacks."""
        if token_id not in self._texts:
            text: str | None = self._backend.id_to_token(token_id)
            for pattern, content in self._replaced:
                text = None if text is None else text.replace(pattern, content)
            self._texts[token_id] = text
        return self._texts[token_id]


class _FromBytes:
    """Decodes UTF-8."""

    def __init__(self, tokens: _ByteLevelTokens, skipped: frozenset[int]) -> None:
        self._tokens = tokens
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._tokens[token_id])

    def tentative(self) -> str:
        return ""

    def rest(self) -> str:
        begun, _ = self._utf8.getstate()
        return begun.decode("utf-8", "replace")


class _FromSpelling:
    """Joins the texts of tokens.

    A run of single bytes is text only if all of it is UTF-8; else each byte is written as one
    replacement character.
    """

    def __init__(self, tokens: _SpelledTokens, skipped: frozenset[int]) -> None:
        self._tokens = tokens
        self._skipped = skipped
        self._num_to_cut = tokens.num_cut
        self._run = b""

    def push(self, token_id: int) -> str:
        text = self._tokens[token_id]
        if text is None or token_id in self._skipped:
            return ""
        if byte := _BYTE_TOKEN.fullmatch(text):
            self._run += bytes.fromhex(byte[1])
            return ""
        text = self._text_of_run() + text
        self._run = b""
        final = self._cut(text)
        if final:
            self._num_to_cut = 0
        else:
            self._num_to_cut -= len(text)
        return final

    def tentative(self) -> str:
        try:
            return self._cut(self._run.decode())
        except UnicodeDecodeError:
            return ""

    def rest(self) -> str:
        return self._cut(self._text_of_run())

    def _text_of_run(self) -> str:
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)

    def _cut(self, text: str) -> str:
        """Returns what follows the final text so far without what a text loses at its start."""
        start = 0
        while start < self._num_to_cut and text[start : start + 1] == self._tokens.cut:
            start += 1
        return text[start:]


class _FromAll:
    """Decodes all ids whenever it is asked."""

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        return ""

    def tentative(self) -> str:
        return self.rest().rstrip(REPLACEMENT)

    def rest(self) -> str:
        return self._decoder.decode(self._token_ids, self._skip_special_tokens)
