"""Turns plain-text novels into token ids: cleans the text by chapter and trains a tokenizer."""

import json
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # stands between chapters; the eos token

HEADING = re.compile(r"^[ \t]*chapter +(?:[ivxlc]+|\d+)\.?[ \t]*$", re.M | re.I)
THE_END = re.compile(r"^[ \t]*(?:THE END|FINIS|Finis|A NOTE ON THE TEXT)\.?[ \t]*$", re.M)
# The start of a paragraph that is not part of the story.
EDITORIAL = re.compile(r"\[|\*|volume [ivx]+$", re.I)


def read_chapters(path: Path) -> list[str]:
    """Returns a novel's chapters without headings, title page or notes, a line per paragraph.

    Lines are joined, and underscores, which mark italics in some editions, are dropped, so that all
    novels look alike. A text without chapter headings is one chapter.
    """
    text = THE_END.split(path.read_text(encoding="utf-8").replace("_", ""), maxsplit=1)[0]
    bodies = HEADING.split(text)
    chapters = []
    for body in bodies[1:] or bodies:
        paragraphs = (" ".join(lines.split()) for lines in re.split(r"\n\s*\n", body))
        chapters.append("\n".join(p for p in paragraphs if p and not EDITORIAL.match(p)))
    return chapters


def train_tokenizer(chapters: list[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE, trained on `chapters`, of at most `vocab_size` ids.

    END_OF_TEXT has id 0.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path, max_length: int) -> None:
    """Writes the tokenizer in the format of transformers, loadable by its versions 4 and 5."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(path)
    # transformers 5 writes a class name that version 4 lacks; both have this one.
    config = path / "tokenizer_config.json"
    changed = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(changed, indent=2) + "\n")


def pack(tokenizer: Tokenizer, chapters: list[str]) -> torch.Tensor:
    """Returns the chapters as one int64 [num_tokens], with END_OF_TEXT around each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [end]
    for chapter in chapters:
        ids += [*tokenizer.encode(chapter).ids, end]
    return torch.tensor(ids)
