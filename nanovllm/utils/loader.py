"""Safetensors checkpoints into a model's parameters: this rank's slices only, and all or nothing.

Each parameter may carry a `WeightLoader` that knows which slices of which checkpoint tensors fill
it; a parameter without one is copied whole. What the checkpoint has and what the model expects are
compared by name before anything is read.
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
PackedModules = Mapping[str, tuple[str, ...]]  # module of ours -> checkpoint modules packed into it


class SliceableTensor(Protocol):
    """A tensor of a checkpoint that is read when it is sliced; torch tensors qualify too."""

    @property
    def shape(self) -> Any: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


@runtime_checkable
class TransformsWeights(Protocol):
    """A module that computes with its parameters in another layout than checkpoints have."""

    def start_loading(self) -> None:
        """Brings the parameters into the checkpoint's layout, in which they can be filled."""
        ...

    def finish_loading(self) -> None:
        """Brings the parameters into the layout that the module computes with."""
        ...


class Parameterized(Protocol):
    """The part of `nn.Module` that loading needs."""

    def modules(self) -> Iterator[nn.Module]: ...
    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """`size` entries along the sharded dimension, from `source` of a checkpoint tensor that has
    `full` of them, to `target` in the parameter."""

    full: int
    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Fills a parameter from slices along `dim`; `shards` is keyed by the checkpoint's module name
    where several are packed into the parameter, by None where there is one."""

    shards: Mapping[str | None, Shard]
    dim: int = 0

    def __call__(self, param: nn.Parameter, loaded: SliceableTensor, part: str | None) -> None:
        shard = self.shards[part]
        expected = list(param.shape)
        expected[self.dim] = shard.full
        if list(loaded.shape) != expected:
            raise ValueError(f"its shape is {list(loaded.shape)}, the config asks for {expected}")
        index = (slice(None),) * self.dim + (slice(shard.source, shard.source + shard.size),)
        param.data.narrow(self.dim, shard.target, shard.size).copy_(loaded[index])


def set_weight_loader(param: nn.Parameter, loader: WeightLoader) -> None:
    param.weight_loader = loader  # type: ignore[attr-defined]


def keep_weight_loader(param: nn.Parameter, previous: nn.Parameter) -> nn.Parameter:
    """Gives `param`, which takes the place of `previous`, its weight loader; returns `param`."""
    if hasattr(previous, "weight_loader"):
        set_weight_loader(param, previous.weight_loader)
    return param


def _weight_loader(param: nn.Parameter) -> WeightLoader:
    size = param.shape[0]
    whole = WeightLoader({None: Shard(full=size, source=0, target=0, size=size)})
    return getattr(param, "weight_loader", None) or whole


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}); download the checkpoint again"
        ) from None


class _FileTensor:
    """`SliceableTensor` over one entry of an open safetensors file."""

    def __init__(self, handle: Any, name: str) -> None:
        self._slice = handle.get_slice(name)
        self.shape = list(self._slice.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[index]
        return tensor


class Checkpoint:
    """The tensors of a checkpoint directory, by name. Reads nothing but headers until asked."""

    def __init__(self, path: str | Path) -> None:
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
        """The shards that the index names (stray files are ignored), else every *.safetensors."""
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
        """Tensor names, less buffers that some old checkpoints store and every model derives."""
        return {name for name in self._file_of if not name.endswith("rotary_emb.inv_freq")}

    def tensors(self, names: set[str]) -> Iterator[tuple[str, SliceableTensor]]:
        """The named tensors, file by file; each is readable only until the next is asked for."""
        for file in sorted({self._file_of[name] for name in names}):
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    if name in names:
                        yield name, _FileTensor(handle, name)

    def is_tied(self, tie_word_embeddings: bool) -> bool:
        """Whether the LM head is the embedding: as the config says, unless the tensors differ."""
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

    Raises `ValueError` if the checkpoint does not match exactly. Names are compared before anything
    is read. A model made in inference mode must be loaded in inference mode.
    """
    transforming = [m for m in model.modules() if isinstance(m, TransformsWeights)]
    for module in transforming:
        module.start_loading()
    _fill(model, checkpoint, packed_modules)
    for module in transforming:
        module.finish_loading()


def _fill(model: Parameterized, checkpoint: Checkpoint, packed_modules: PackedModules) -> None:
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
    """Checkpoint tensor name -> the parameter that it fills, and which part of it."""
    sources: dict[str, tuple[nn.Parameter, str | None]] = {}
    for param_name, param in model.named_parameters():  # tied parameters come once
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
    missing = expected - checkpoint.names
    if missing:
        raise ValueError(
            f"{checkpoint.path} lacks tensors that its config asks for: {_few(missing)}"
        )
    unknown = checkpoint.names - expected
    unknown -= set() if LM_HEAD in expected else {LM_HEAD}  # a copy of the embedding
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has tensors that its architecture does not know: {_few(unknown)}; "
            "quantized or adapter checkpoints are not supported"
        )


def _few(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
