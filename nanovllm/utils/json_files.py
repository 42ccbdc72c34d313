"""Reads the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from nanovllm.utils.shown import cut

AGAIN = "download the checkpoint again"


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object that a file holds; raises `ValueError` naming the file if it has none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last if it is nested too deeply
        raise ValueError(f"cannot read {file}: {cut(error)}; {AGAIN}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"cannot read {file}: it holds a {kind}, not an object; {AGAIN}")
    return content
