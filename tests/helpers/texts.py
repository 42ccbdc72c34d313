"""Makes tokenizers and texts that are hard to decode token by token, and tells by brute force where a
stop string ends a completion."""

from collections.abc import Sequence

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "a",
    "stop",
    " so",
    "é",
    "日本",
    "🙂",
    "👩‍👩‍👧",
    "e\u0301",
    "न\u093f",
    "\u200d",
    "\n\n",
    "  ",
    "ﷺ",
    "</s>",
]
SPECIAL = "<|end|>"
ADDED = "<tool call>"  # has a character that byte-level tokens lack
PIECES = ["▁", "▁a", "b", "▁▁", "é", "日", "x▁y", "stop", "▁st", "op", "a"]

# Text as people write it, and text that no encoding gives.
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=8).map("".join)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are single bytes and a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added_tokens(tokenizer)


def sentencepiece_tokenizer(num_cut: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with pieces as those of sentencepiece and a token for each byte.

    num_cut: spaces that a text loses at its start.
    """
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if num_cut:
        steps.append(decoders.Strip(" ", num_cut, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return _with_added_tokens(tokenizer)


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a kind that is decoded as a whole."""
    vocab = {word: number for number, word in enumerate(["[UNK]", "a", "##b", "stop", "##s", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return _with_added_tokens(tokenizer)


def _with_added_tokens(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL, clean_up_tokenization_spaces=False
    )
    fast.add_tokens([ADDED])
    return fast


def first_stop(
    texts: Sequence[str], stop: Sequence[str], min_tokens: int
) -> tuple[int, int, str] | None:
    """Returns the number of tokens, the start and the stop string that end a completion.

    texts: what is certain of the text after each number of tokens, from 0 on.
    """
    for num_tokens in range(max(min_tokens, 1), len(texts)):
        text, num_old = texts[num_tokens], len(texts[num_tokens - 1])
        found = [
            (start, order)
            for order, string in enumerate(stop)
            for start in range(len(text))
            if text.startswith(string, start) and start + len(string) > num_old
        ]
        if found:
            start, order = min(found)
            return num_tokens, start, stop[order]
    return None


def certain_text(raw: bytes) -> str:
    """Returns the text of bytes without a character at their end that more bytes may complete."""
    for size in (3, 2, 1):
        for fill in (b"\x80", b"\xbf"):
            for count in (1, 2, 3):
                end = raw[-size:] + fill * count
                if len(raw) >= size and _is_character(end):
                    return raw[:-size].decode("utf-8", "replace")
    return raw.decode("utf-8", "replace")


def _is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False
