"""Sources of weights: a safetensors checkpoint directory, or tensors that a caller gives.

Of a directory, nothing but headers is read until a tensor is sliced.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class SliceableTensor(Protocol):
    """A checkpoint's tensor, read only when it is sliced. Torch tensors qualify too."""

    @property
    def shape(self) -> Any: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


class WeightSource(Protocol):
    """Where a model's weights come from: tensors by name."""

    @property
    def label(self) -> str:
        """What errors call it."""
        ...

    @property
    def names(self) -> set[str]: ...

    def tensors(self, names: set[str]) -> Iterator[tuple[str, SliceableTensor]]:
        """Yields (name, tensor); a tensor is readable until the next is asked for."""
        ...


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
    def label(self) -> str:
        return str(self.path)

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
        is_tied = has_equal_head(self)
        if not is_tied:
            logger.warning(
                "%s: tie_word_embeddings is true, but %s differs from the embedding; keeping both",
                self.path,
                LM_HEAD,
            )
        return is_tied


class GivenWeights:
    """Tensors that a caller gives, as (name, tensor) pairs."""

    label = "weights"

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises `TypeError` or `ValueError` for anything but floating tensors with names of their
        own."""
        self._tensors: dict[str, torch.Tensor] = {}
        for index, pair in enumerate(weights):
            if not isinstance(pair, tuple) or [*map(_kind, pair)] != [str, torch.Tensor]:
                raise TypeError(
                    f"weights must be pairs of name and tensor, got {pair!r:.200} at index {index}"
                )
            name, tensor = pair
            if name in self._tensors:
                raise ValueError(f"weights have tensor {name!r} twice")
            if not tensor.is_floating_point():
                raise ValueError(
                    f"weights have tensor {name!r} in {tensor.dtype}, which is not a floating dtype"
                )
            self._tensors[name] = tensor.detach()

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def tensors(self, names: set[str]) -> Iterator[tuple[str, SliceableTensor]]:
        for name in sorted(names):
            yield name, self._tensors[name]

    def save(self, directory: str | Path) -> Checkpoint:
        """Writes the tensors, one by one, where other processes can read them."""
        for number, (name, tensor) in enumerate(self._tensors.items()):
            file = Path(directory) / f"{number}.safetensors"
            save_file({name: tensor.cpu().contiguous()}, file)
        return Checkpoint(directory)


def has_equal_head(source: WeightSource) -> bool:
    """Whether the LM head and the embedding of a source that has both are equal."""
    head, embedding = (next(source.tensors({name}))[1][:] for name in (LM_HEAD, EMBEDDING))
    return torch.equal(head, embedding)


def _kind(value: object) -> type:
    return next((kind for kind in (str, torch.Tensor) if isinstance(value, kind)), object)
