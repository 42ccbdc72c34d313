"""Which files of a directory hold a checkpoint's weights.

As in transformers, `model.safetensors` comes first, whatever lies beside it, then the index with
the files that it names. A directory with neither has shards that say themselves how many they are,
or any *.safetensors files. Hidden files are never read.
"""

import json
import re
from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_AGAIN = "download the checkpoint again"


def weight_files(path: Path) -> list[Path]:
    """Returns the files in order; raises `ValueError` if there are none or some are missing."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).is_file():
        names, source = _indexed(path / INDEX_FILE), f"{INDEX_FILE} names it"
    else:
        visible = {file.name for file in path.glob("*.safetensors") if file.name[0] != "."}
        shards = {match for match in map(_SHARD.fullmatch, visible) if match}
        names = {name for match in shards for name in _siblings(match)} or visible
        source = "the others' names count it"
    if not names:
        raise ValueError(f"model directory {str(path)!r} has no *.safetensors file; {_AGAIN}")
    for name in sorted(names):
        if not (path / name).is_file():  # a broken link, too, as an interrupted download leaves it
            raise ValueError(f"{path}: {name} is missing though {source}; {_AGAIN}")
    return [path / name for name in sorted(names)]


def _indexed(index: Path) -> set[str]:
    """Returns the files that an index names."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {index}: {error!r}; {_AGAIN}") from error
    for name in names:
        is_plain = isinstance(name, str) and name not in (".", "..") and not set(name) & set("/\\:")
        if not is_plain or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index} names {name!r}, which is no safetensors file of its directory; {_AGAIN}"
            )
    return names


def _siblings(match: re.Match[str]) -> set[str]:
    """Returns the names of all shards that a shard's own name counts."""
    number, total = match.groups()
    return {
        f"model-{index:0{len(number)}}-of-{total}.safetensors" for index in range(1, int(total) + 1)
    }
