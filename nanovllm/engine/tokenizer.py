"""The checkpoint's tokenizer, if it has one, and the ids that end a completion."""

import json
import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """None, with a warning, if the directory has no tokenizer files."""
    if not any((Path(model) / name).is_file() for name in TOKENIZER_FILES):
        logger.warning("%s has no tokenizer: prompts must be token ids, text stays empty", model)
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return tokenizer


def stop_token_ids(
    model: str, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> set[int]:
    """The union of what tokenizer, config and generation_config.json call end of sequence."""
    sources: list[Any] = [hf_config.eos_token_id]
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    generation_config = Path(model) / "generation_config.json"
    if generation_config.is_file():
        sources.append(json.loads(generation_config.read_text()).get("eos_token_id"))
    stop: set[int] = set()
    for ids in sources:
        if ids is not None:
            stop.update(ids if isinstance(ids, list) else [ids])
    return stop
