"""Reads a safetensors checkpoint directory: which tensors it has, and slices of them.

Nothing but headers is read until a tensor is sliced.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class SliceableTensor(Protocol):
    """A checkpoint's tensor, read only when it is sliced. Torch tensors qualify too."""

    @property
    def shape(self) -> Any: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


def _open(file: Path) -> Any:
    """Opens a safetensors file, a context manager; raises `ValueError` if it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}); download the checkpoint again"
        ) from None


class _FileTensor:
    """The `SliceableTensor` of one entry of an open safetensors file."""

    def __init__(self, handle: Any, name: str) -> None:
        self._slice = handle.get_slice(name)
        self.shape = list(self._slice.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[index]
        return tensor


class Checkpoint:
    """The tensors of a checkpoint directory, by name. It reads only headers until used."""

    def __init__(self, path: str | Path) -> None:
        """Reads the headers; raises `ValueError` for a damaged, missing or duplicate part."""
        self.path = Path(path)
        self._file_of: dict[str, Path] = {}
        for file in self._files():
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    if name in self._file_of:
                        raise ValueError(
                            f"{self.path}: tensor {name!r} is in both {self._file_of[name].name} "
                            f"and {file.name}; remove the stale file"
                        )
                    self._file_of[name] = file

    def _files(self) -> list[Path]:
        """Returns the files that the index names, or without an index every *.safetensors file."""
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            return sorted(self.path.glob("*.safetensors"))
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError) as error:
            raise ValueError(f"cannot read {index}: {error!r}; download it again") from error
        files = [self.path / name for name in sorted(names)]
        for file in files:
            if not file.is_file():
                raise ValueError(
                    f"{self.path}: {file.name} is missing though {index.name} names it; "
                    "download the checkpoint again"
                )
        return files

    @property
    def names(self) -> set[str]:
        """The tensors' names, without buffers that some old checkpoints store and models derive."""
        return {name for name in self._file_of if not name.endswith("rotary_emb.inv_freq")}

    def tensors(self, names: set[str]) -> Iterator[tuple[str, SliceableTensor]]:
        """Yields (name, tensor) file by file; a tensor is readable until the next is asked for."""
        for file in sorted({self._file_of[name] for name in names}):
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    if name in names:
                        yield name, _FileTensor(handle, name)

    def is_tied(self, tie_word_embeddings: bool) -> bool:
        """Returns whether the LM head shares the embedding's weight: `tie_word_embeddings`, unless
        the checkpoint holds both and they differ."""
        if not tie_word_embeddings or not {LM_HEAD, EMBEDDING} <= self.names:
            return tie_word_embeddings
        head, embedding = (next(self.tensors({name}))[1][:] for name in (LM_HEAD, EMBEDDING))
        is_tied = torch.equal(head, embedding)
        if not is_tied:
            logger.warning(
                "%s: tie_word_embeddings is true, but %s differs from the embedding; keeping both",
                self.path,
                LM_HEAD,
            )
        return is_tied
