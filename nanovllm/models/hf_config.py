"""Reads a checkpoint's config.json, without ever running code that comes with a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from nanovllm.models import known_architecture
from nanovllm.models.config_fields import check_fields
from nanovllm.utils.json_files import read_object
from nanovllm.utils.shown import cut, shown

NOT_FOR_TRANSFORMERS = ("dtype", "torch_dtype", "auto_map")  # the former two are read here


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What a config.json says.

    tie_word_embeddings: None where it has no such flag, for which transformers would fill in its
        family's default.
    dtype: the value as it stands there; None if there is none.
    """

    hf_config: PretrainedConfig
    tie_word_embeddings: bool | None
    dtype: object


def read_config(path: str) -> CheckpointConfig:
    """Returns the config of a checkpoint directory.

    Raises `ValueError` for a file that cannot be read, and before transformers sees the file for
    architectures that are not supported, which it may not know either, and for absurd fields.
    """
    file = Path(path) / "config.json"
    content = read_object(file)
    known_architecture(content.get("architectures"))
    check_fields(content)
    dtype = content.get("dtype")  # before transformers 5 torch_dtype
    return CheckpointConfig(
        _hf_config(content, file),
        content.get("tie_word_embeddings"),
        content.get("torch_dtype") if dtype is None else dtype,
    )


def _hf_config(content: dict[str, Any], file: Path) -> PretrainedConfig:
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"cannot read {file}: transformers does not know model_type {shown(model_type)}; "
            "correct it, or use a checkpoint in the format of transformers"
        )
    fields = {name: content[name] for name in content if name not in NOT_FOR_TRANSFORMERS}
    try:
        hf_config: PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # of whatever kind its library raises
        raise ValueError(f"cannot read {file}: {cut(error)}") from error
    return hf_config
