"""Loads a safetensors checkpoint into a model's parameters, all of them or none.

Each parameter may carry a `WeightLoader` that knows which slices of which checkpoint tensors fill
it on this rank; a parameter without one is copied whole. The tensors that the checkpoint has and
those that the model expects are compared by name before any data are read.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
PackedModules = Mapping[str, tuple[str, ...]]  # our module -> checkpoint modules packed into it


class SliceableTensor(Protocol):
    """A checkpoint's tensor, read only when it is sliced. Torch tensors qualify too."""

    @property
    def shape(self) -> Any: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@runtime_checkable
class TransformsWeights(Protocol):
    """A module that computes with its parameters in a layout other than the checkpoint's."""

    def start_loading(self) -> None:
        """Changes the parameters to the checkpoint's layout, in which they can be filled."""
        ...

    def finish_loading(self) -> None:
        """Changes the parameters to the layout that the module computes with."""
        ...


class Parameterized(Protocol):
    """The methods of `nn.Module` that loading needs."""

    def modules(self) -> Iterator[nn.Module]: ...
    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of a checkpoint tensor, and its place in a parameter, along the sharded dimension.

    full: entries of the checkpoint tensor.
    source, target: the first entry in the checkpoint tensor, and in the parameter.
    size: entries to copy.
    """

    full: int
    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Fills a parameter from slices of checkpoint tensors along `dim`.

    shards: by the name of the checkpoint's module if the parameter packs several modules, else by
        None alone.
    """

    shards: Mapping[str | None, Shard]
    dim: int = 0

    def __call__(self, param: nn.Parameter, loaded: SliceableTensor, part: str | None) -> None:
        """Copies `part`'s slice of `loaded` into `param`; raises `ValueError` on a wrong shape."""
        shard = self.shards[part]
        expected = list(param.shape)
        expected[self.dim] = shard.full
        if list(loaded.shape) != expected:
            raise ValueError(f"its shape is {list(loaded.shape)}, the config asks for {expected}")
        index = (slice(None),) * self.dim + (slice(shard.source, shard.source + shard.size),)
        param.data.narrow(self.dim, shard.target, shard.size).copy_(loaded[index])


def set_weight_loader(param: nn.Parameter, loader: WeightLoader) -> None:
    """Attaches `loader` to `param`, which `load_model` then fills by it."""
    param.weight_loader = loader  # type: ignore[attr-defined]


def keep_weight_loader(param: nn.Parameter, previous: nn.Parameter) -> nn.Parameter:
    """Hands the weight loader of `previous` to `param`, which replaces it; returns `param`."""
    if hasattr(previous, "weight_loader"):
        set_weight_loader(param, previous.weight_loader)
    return param


def _weight_loader(param: nn.Parameter) -> WeightLoader:
    """Returns the loader attached to `param`, or one that copies a whole tensor into it."""
    size = param.shape[0]
    whole = WeightLoader({None: Shard(full=size, source=0, target=0, size=size)})
    return getattr(param, "weight_loader", None) or whole


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


def load_model(model: Parameterized, checkpoint: Checkpoint, packed_modules: PackedModules) -> None:
    """Fills every parameter of `model`, which may have been loaded before.

    Raises `ValueError` if the checkpoint and the model do not match exactly. A model made in
    inference mode must be loaded in inference mode.
    """
    transforming = [m for m in model.modules() if isinstance(m, TransformsWeights)]
    for module in transforming:
        module.start_loading()
    _fill(model, checkpoint, packed_modules)
    for module in transforming:
        module.finish_loading()


def _fill(model: Parameterized, checkpoint: Checkpoint, packed_modules: PackedModules) -> None:
    """Copies the checkpoint's tensors into parameters that are in its layout."""
    sources = _sources(model, packed_modules)
    _check_names(checkpoint, set(sources))
    for name, tensor in checkpoint.tensors(set(sources)):
        param, part = sources[name]
        try:
            _weight_loader(param)(param, tensor, part)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: cannot load tensor {name!r}: {error}") from None


def _sources(
    model: Parameterized, packed_modules: PackedModules
) -> dict[str, tuple[nn.Parameter, str | None]]:
    """Returns, by checkpoint tensor name, the parameter that it fills and which part of it."""
    sources: dict[str, tuple[nn.Parameter, str | None]] = {}
    for param_name, param in model.named_parameters():  # yields tied parameters once
        components = param_name.split(".")
        packed = next((i for i, c in enumerate(components) if c in packed_modules), None)
        if packed is None:
            sources[param_name] = (param, None)
            continue
        for part in packed_modules[components[packed]]:
            name = ".".join([*components[:packed], part, *components[packed + 1 :]])
            sources[name] = (param, part)
    return sources


def _check_names(checkpoint: Checkpoint, expected: set[str]) -> None:
    """Raises `ValueError` if the checkpoint lacks an expected tensor or has an unknown one."""
    missing = expected - checkpoint.names
    if missing:
        raise ValueError(
            f"{checkpoint.path} lacks tensors that its config asks for: {_summary(missing)}"
        )
    unknown = checkpoint.names - expected
    unknown -= set() if LM_HEAD in expected else {LM_HEAD}  # if tied, a copy of the embedding
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has tensors that its architecture does not know: "
            f"{_summary(unknown)}; quantized or adapter checkpoints are not supported"
        )


def _summary(names: set[str]) -> str:
    """Returns the first three names in order, and how many more there are."""
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
