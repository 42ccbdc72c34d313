"""Reads a safetensors checkpoint directory: which tensors it has, and slices of them.

Nothing but headers is read until a tensor is sliced. A file is mapped into memory while it is read,
and mapped pages count as this process's memory; so it is opened anew every `MAX_MAPPED_BYTES`.
"""

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.utils.json_files import AGAIN
from nanovllm.utils.shown import cut, shown
from nanovllm.utils.weight_files import weight_files

logger = logging.getLogger("nanovllm")

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of the dtypes that weights may have
MAX_MAPPED_BYTES = 2**26
PIECE_BYTES = 2**24  # of a tensor that is compared or copied at a time
# Buffers that some old checkpoints store and models derive.
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


class SliceableTensor(Protocol):
    """A checkpoint's tensor, read only when it is sliced. Torch tensors qualify too."""

    @property
    def shape(self) -> Any: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The shape of a tensor, and its dtype as safetensors spells it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


class WeightSource(Protocol):
    """Where a model's weights come from: tensors by name."""

    @property
    def label(self) -> str:
        """What errors call it."""
        ...

    @property
    def names(self) -> set[str]: ...

    def header(self, name: str) -> TensorHeader: ...

    def tensors(self, names: set[str]) -> Iterator[tuple[str, SliceableTensor]]:
        """Yields (name, tensor); a tensor is readable until the next is asked for."""
        ...


def _open(file: Path) -> Any:
    """Opens a safetensors file, a context manager; raises `ValueError` if it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({cut(error)}); {AGAIN}"
        ) from None


class _File:
    """An open safetensors file, which is opened anew before too much of it is mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = _open(path)
        self._mapped_bytes = 0

    def read(self, name: str, index: Any) -> torch.Tensor:
        if self._mapped_bytes > MAX_MAPPED_BYTES:
            self._handle, self._mapped_bytes = _open(self._path), 0
        tensor: torch.Tensor = self._handle.get_slice(name)[index]
        self._mapped_bytes += tensor.nbytes
        return tensor


@dataclass(frozen=True, slots=True)
class _FileTensor:
    """The `SliceableTensor` of one entry of an open safetensors file."""

    file: _File
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.file.read(self.name, index)


class Checkpoint:
    """The tensors of a checkpoint directory, by name. It reads only headers until used."""

    def __init__(self, path: str | Path) -> None:
        """Reads the headers; raises `ValueError` for a damaged, missing or duplicate part."""
        self.path = Path(path)
        self._headers: dict[str, TensorHeader] = {}
        self._file_of: dict[str, Path] = {}
        for file in weight_files(self.path):
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    if name in self._headers:
                        other = self._file_of[name].name
                        raise ValueError(
                            f"{self.path}: tensor {shown(name)} is in both {other} and "
                            f"{file.name}; remove the stale file"
                        )
                    tensor = handle.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    self._headers[name] = TensorHeader(shape, tensor.get_dtype())
                    self._file_of[name] = file

    @property
    def label(self) -> str:
        return str(self.path)

    @property
    def names(self) -> set[str]:
        """The tensors' names, without buffers that some old checkpoints store and models derive."""
        return {name for name in self._headers if not _DERIVED.fullmatch(name)}

    def header(self, name: str) -> TensorHeader:
        return self._headers[name]

    def tensors(self, names: set[str]) -> Iterator[tuple[str, SliceableTensor]]:
        """Yields (name, tensor) file by file; a tensor is readable until the next is asked for."""
        by_file: dict[Path, list[str]] = {}
        for name, path in self._file_of.items():  # in the order in which the file has them
            if name in names:
                by_file.setdefault(path, []).append(name)
        for path, names_of_file in by_file.items():
            file = _File(path)
            for name in names_of_file:
                yield name, _FileTensor(file, name, self._headers[name].shape)

    def is_tied(self, tie_word_embeddings: bool | None) -> bool:
        """Returns whether the LM head shares the embedding's weight.

        tie_word_embeddings: the flag of config.json, which decides unless the checkpoint holds both
            weights and they differ. None, no flag: it shares if the checkpoint has no head.
        """
        if LM_HEAD not in self._headers or EMBEDDING not in self._headers:
            if tie_word_embeddings is None:
                logger.warning(
                    "%s: neither tie_word_embeddings nor %s is there; the head is the embedding",
                    self.path,
                    LM_HEAD,
                )
            return tie_word_embeddings is not False
        if not tie_word_embeddings:
            return False
        is_tied = has_equal_head(self)
        if not is_tied:
            logger.warning(
                "%s: tie_word_embeddings is true, but %s differs from the embedding; keeping both",
                self.path,
                LM_HEAD,
            )
        return is_tied


def has_equal_head(source: WeightSource) -> bool:
    """Returns whether the LM head and the embedding of a source that has both are equal."""
    header = source.header(LM_HEAD)
    if header != source.header(EMBEDDING):
        return False
    (_, head), (_, embedding) = (next(source.tensors({name})) for name in (LM_HEAD, EMBEDDING))
    rows = pieces(header.shape[0], header.num_bytes)
    return all(torch.equal(head[piece], embedding[piece]) for piece in rows)


def pieces(num_rows: int, num_bytes: int) -> Iterator[slice]:
    """Yields slices that cut so many rows, of `num_bytes` in all, into pieces of `PIECE_BYTES`."""
    step = max(num_rows * PIECE_BYTES // max(num_bytes, 1), 1)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
