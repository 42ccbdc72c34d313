"""Which files of a directory hold a checkpoint's weights.

As in transformers, `model.safetensors` comes first, whatever lies beside it, then the index with
the files that it names. A directory with neither has shards that say themselves how many they are,
or any *.safetensors files. Hidden files are never read.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from nanovllm.utils.json_files import AGAIN, read_object
from nanovllm.utils.shown import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors", re.ASCII)


def weight_files(path: Path) -> list[Path]:
    """Returns the files in order; raises `ValueError` if there are none or some are missing."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    names: Iterable[str]
    if (path / INDEX_FILE).is_file():
        names, source = sorted(_indexed(path / INDEX_FILE)), f"{INDEX_FILE} names it"
    else:
        visible = {file.name for file in path.glob("*.safetensors") if file.name[0] != "."}
        shards = {match for match in map(_SHARD.fullmatch, visible) if match}
        names, source = (
            _siblings(shards) if shards else sorted(visible),
            "the others' names count it",
        )
    files = []
    for name in names:
        if not (path / name).is_file():  # a broken link, too, as an interrupted download leaves it
            raise ValueError(f"{path}: {name} is missing though {source}; {AGAIN}")
        files.append(path / name)
    if not files:
        raise ValueError(f"model directory {str(path)!r} has no *.safetensors file; {AGAIN}")
    return files


def _indexed(index: Path) -> set[str]:
    """Returns the files that an index names."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"cannot read {index}: its weight_map is {shown(weight_map)}, not an object; {AGAIN}"
        )
    for name in weight_map.values():
        is_plain = isinstance(name, str) and name not in (".", "..") and not set(name) & set("/\\:")
        if not is_plain or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index} names {shown(name)}, which is no safetensors file of its directory; "
                f"{AGAIN}"
            )
    return set(weight_map.values())


def _siblings(shards: set[re.Match[str]]) -> Iterator[str]:
    """Yields the names of all shards that the names of some count; the count may be absurd."""
    for width, total in sorted({(len(match[1]), match[2]) for match in shards}):
        for index in range(1, int(total) + 1):
            yield f"model-{index:0{width}}-of-{total}.safetensors"
