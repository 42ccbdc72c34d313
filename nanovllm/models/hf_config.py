"""Reads a checkpoint's config.json, without ever running code that comes with a checkpoint."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nanovllm.models import known_architecture
from nanovllm.models.supported import SIZES, check_size


def read_hf_config(path: str) -> PretrainedConfig:
    """Returns the config of a checkpoint directory.

    Raises `ValueError` for a file that cannot be read, and before transformers sees the file for
    architectures that are not supported, which it may not know either, and for absurd sizes, of
    which it would make lists.
    """
    content = _read(path)
    known_architecture(content.get("architectures"))
    for name in SIZES:
        if content.get(name) is not None:
            check_size(name, content[name])
    try:
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of whatever kind its library raises
        raise ValueError(f"cannot read {path}/config.json: {error}") from error
    return hf_config


def tie_flag(path: str) -> bool | None:
    """Returns `tie_word_embeddings` of a directory's config.json, and None where it has no such
    flag, for which transformers would fill in its family's default."""
    flag: bool | None = _read(path).get("tie_word_embeddings")
    return flag


def _read(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"cannot read {file}: it holds a {type(content).__name__}, not an object")
    return content
