"""The checkpoint's tokenizer, if it has one, and the ids that end a completion."""

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from nanovllm.utils.json_files import AGAIN, read_object
from nanovllm.utils.shown import cut, shown

logger = logging.getLogger("nanovllm")

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def load_tokenizer(
    model: str, hf_config: PretrainedConfig | None = None
) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer of a checkpoint directory.

    hf_config: its config, which may name the tokenizer's class; None reads it again.

    Returns None, with a warning, if the directory has no vocabulary. Raises `ValueError` if what it
    has cannot be loaded.
    """
    if not any((Path(model) / name).is_file() for name in VOCABULARY_FILES):
        logger.warning("%s has no tokenizer: prompts must be token ids, text stays empty", model)
        return None
    with _library_errors_as(lambda error: _load_failure(model, error)):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model, config=hf_config, local_files_only=True, trust_remote_code=False
        )
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, what: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Returns the ids of a text; errors call it `what`."""
    with _library_errors_as(lambda error: f"the tokenizer fails on {what}: {_told(error)}"):
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return token_ids


@contextmanager
def _library_errors_as(message: Callable[[BaseException], str]) -> Iterator[None]:
    """Turns errors of a tokenizer's library, of whatever kind, into `ValueError`.

    Those of its Rust part are no `Exception`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(message(error)) from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {cut(error)}"


def _load_failure(model: str, error: BaseException) -> str:
    """Says which file cannot be read, if that is why, and the fix."""
    for name in JSON_FILES:
        if (Path(model) / name).is_file():
            try:
                read_object(Path(model) / name)
            except ValueError as unreadable:
                return f"cannot load the tokenizer of {model}: {unreadable}"
    is_fast = (Path(model) / "tokenizer.json").is_file()
    has_model = (Path(model) / "tokenizer.model").is_file()
    hint = AGAIN
    if has_model and not is_fast and importlib.util.find_spec("sentencepiece") is None:
        hint = "tokenizer.model usually needs the package sentencepiece: pip install sentencepiece"
    return f"cannot load the tokenizer of {model}: {_told(error)}; {hint}"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: str, vocab_size: int) -> None:
    """Raises `ValueError` for a tokenizer of another model, which has ids that this one lacks.

    Added tokens alone may lack a row of the embedding, as in checkpoints that were finetuned with
    one for padding: a warning tells of them, and prompts that have them are refused.
    """
    template, longest = tokenizer.chat_template, tokenizer.model_max_length
    if not isinstance(template, str | Mapping | None):
        raise ValueError(
            f"{model}: the tokenizer's chat_template must be a text, not "
            f"{shown(template)}; correct it"
        )
    if not isinstance(longest, int | float):
        raise ValueError(
            f"{model}: model_max_length in tokenizer_config.json must be a number, got "
            f"{shown(longest)}; correct or remove it"
        )
    added = tokenizer.added_tokens_decoder
    largest = max((i for i in tokenizer.get_vocab().values() if i not in added), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"{model}: its tokenizer has ids up to {largest}, but vocab_size={vocab_size} in "
            "config.json: the tokenizer is another model's; replace its files by those of the "
            "checkpoint, or remove them and pass token ids"
        )
    beyond = sorted(token_id for token_id in added if token_id >= vocab_size)
    if beyond:
        logger.warning(
            "%s: prompts must not have the tokenizer's added tokens %s, of which the model, with "
            "vocab_size=%d, has no embedding",
            model,
            shown([str(added[token_id]) for token_id in beyond]),
            vocab_size,
        )


def stop_token_ids(
    model: str, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> set[int]:
    """Returns all ids that tokenizer, config or generation_config.json call end of sequence."""
    sources: dict[str, Any] = {"config.json": getattr(hf_config, "eos_token_id", None)}
    if tokenizer is not None:
        sources["the tokenizer"] = tokenizer.eos_token_id
    generation_config = Path(model) / "generation_config.json"
    if generation_config.is_file():
        sources[generation_config.name] = read_object(generation_config).get("eos_token_id")
    stop: set[int] = set()
    for source, value in sources.items():
        ids = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [token_id for token_id in ids if type(token_id) is not int]
        if wrong:
            raise ValueError(f"{model}: eos_token_id must be ints, got {shown(wrong)} in {source}")
        wrong = [token_id for token_id in ids if not 0 <= token_id < hf_config.vocab_size]
        if wrong:
            raise ValueError(
                f"{model}: eos_token_id must be below vocab_size={hf_config.vocab_size}, got "
                f"{shown(wrong)} in {source}; correct or remove it there"
            )
        stop.update(ids)
    return stop
