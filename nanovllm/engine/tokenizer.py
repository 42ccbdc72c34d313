"""The checkpoint's tokenizer, if it has one, and the ids that end a completion."""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer of a checkpoint directory.

    Returns None, with a warning, if the directory has no vocabulary. Raises `ValueError` if what it
    has cannot be loaded.
    """
    if not any((Path(model) / name).is_file() for name in VOCABULARY_FILES):
        logger.warning("%s has no tokenizer: prompts must be token ids, text stays empty", model)
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of whatever kind its library raises
        raise ValueError(f"cannot load the tokenizer of {model}: {error}{_hint(model)}") from error
    return tokenizer


def _hint(model: str) -> str:
    """Returns the usual fix for a vocabulary that only SentencePiece can read, else nothing."""
    is_fast = (Path(model) / "tokenizer.json").is_file()
    has_model = (Path(model) / "tokenizer.model").is_file()
    if is_fast or not has_model or importlib.util.find_spec("sentencepiece") is not None:
        return ""
    return "; tokenizer.model usually needs the package sentencepiece: pip install sentencepiece"


def stop_token_ids(
    model: str, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> set[int]:
    """Returns all ids that tokenizer, config or generation_config.json call end of sequence."""
    sources: list[Any] = [getattr(hf_config, "eos_token_id", None)]
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    generation_config = Path(model) / "generation_config.json"
    if generation_config.is_file():
        try:
            sources.append(json.loads(generation_config.read_text()).get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"cannot read {generation_config}: {error}") from error
    stop: set[int] = set()
    for ids in sources:
        if ids is not None:
            stop.update(ids if isinstance(ids, list) else [ids])
    wrong = [token_id for token_id in stop if type(token_id) is not int]
    if wrong:
        raise ValueError(f"{model}: eos_token_id must be ints, got {wrong}")
    return stop
