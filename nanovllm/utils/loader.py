"""Loads weights into a model's parameters, all of them or none.

Each parameter may carry a `WeightLoader` that knows which slices of which checkpoint tensors fill
it on this rank; a parameter without one is copied whole. The tensors that there are and those that
the model expects are compared by name, shape and dtype before any data are read. Data are copied in
pieces, so that the host holds little of them at a time.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from nanovllm.utils.checkpoint import (
    EMBEDDING,
    ITEM_BYTES,
    LM_HEAD,
    SliceableTensor,
    WeightSource,
    has_equal_head,
    pieces,
)
from nanovllm.utils.loading_progress import LoadingProgress
from nanovllm.utils.shown import shown

# By checkpoint tensor name, the parameter that it fills and which part of it.
Sources = dict[str, tuple[nn.Parameter, str | None]]
PackedModules = Mapping[str, tuple[str, ...]]  # our module -> checkpoint modules packed into it


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
    dim: int = 0  # 0 or 1

    def __call__(self, param: nn.Parameter, loaded: SliceableTensor, part: str | None) -> None:
        """Copies `part`'s slice of `loaded` into `param`."""
        shard = self.shards[part]
        target = param.data.narrow(self.dim, shard.target, shard.size)
        first = shard.source if self.dim == 0 else 0
        columns = () if self.dim == 0 else (slice(shard.source, shard.source + shard.size),)
        for rows in pieces(target.shape[0], target.nbytes):
            index = (slice(first + rows.start, first + rows.stop), *columns)
            target[rows].copy_(loaded[index])

    def source_shape(self, param: nn.Parameter, part: str | None) -> list[int]:
        """Returns the shape of the checkpoint's tensor that holds `part`."""
        shape = list(param.shape)
        shape[self.dim] = self.shards[part].full
        return shape


@runtime_checkable
class NamesTensors(Protocol):
    """A weight loader that knows the names of the tensors that it loads from.

    Those of any other follow from the parameter's name and `PackedModules`.
    """

    def tensor_names(
        self, param_name: str, param: nn.Parameter, available: Set[str]
    ) -> dict[str, str | None]:
        """Returns the part that each tensor is, by the tensor's name.

        available: the tensors of the checkpoint; more may be asked for, and are then missing.
        """
        ...

    def __call__(self, param: nn.Parameter, loaded: SliceableTensor, part: str | None) -> None: ...

    def source_shape(self, param: nn.Parameter, part: str | None) -> list[int]: ...


AnyWeightLoader = WeightLoader | NamesTensors


def set_weight_loader(param: nn.Parameter, loader: AnyWeightLoader) -> None:
    """Attaches `loader` to `param`, which `load_model` then fills by it."""
    param.weight_loader = loader  # type: ignore[attr-defined]


def keep_weight_loader(param: nn.Parameter, previous: nn.Parameter) -> nn.Parameter:
    """Hands the weight loader of `previous` to `param`, which replaces it; returns `param`."""
    if hasattr(previous, "weight_loader"):
        set_weight_loader(param, previous.weight_loader)
    return param


def _weight_loader(param: nn.Parameter) -> AnyWeightLoader:
    """Returns the loader attached to `param`, or one that copies a whole tensor into it."""
    size = param.shape[0]
    whole = WeightLoader({None: Shard(full=size, source=0, target=0, size=size)})
    return getattr(param, "weight_loader", None) or whole


class _Rounded:
    """A tensor in another dtype, converted slice by slice."""

    def __init__(self, tensor: SliceableTensor, dtype: torch.dtype) -> None:
        self.shape = tensor.shape
        self._tensor = tensor
        self._dtype = dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index].to(self._dtype)


def load_model(
    model: Parameterized,
    source: WeightSource,
    packed_modules: PackedModules,
    *,
    shows_progress: bool = False,
) -> None:
    """Fills every parameter of `model`, which may have been loaded before.

    Raises `ValueError` if the weights and the model do not match exactly. A model made in inference
    mode must be loaded in inference mode.

    shows_progress: a load that takes some seconds shows a progress bar.
    """
    with _loading(model):
        _fill(check_tensors(model, source, packed_modules), source, shows_progress=shows_progress)


def update_weights(
    model: Parameterized, source: WeightSource, packed_modules: PackedModules, dtype: torch.dtype
) -> None:
    """Replaces the weights of a loaded model, in place where it computes with them as they come.

    dtype: the model's, to which the weights are converted.

    Raises `ValueError` and changes nothing if the weights do not match exactly.
    """
    with _loading(model):
        _fill(_checked(model, source, packed_modules), source, dtype)


def check_weights(
    model: Parameterized, source: WeightSource, packed_modules: PackedModules
) -> None:
    """Raises the errors of `update_weights`, and changes nothing."""
    with _loading(model):
        _checked(model, source, packed_modules)


@contextmanager
def _loading(model: Parameterized) -> Iterator[None]:
    """Holds the parameters in the checkpoint's layout within the block."""
    transforming = [m for m in model.modules() if isinstance(m, TransformsWeights)]
    for module in transforming:
        module.start_loading()
    try:
        yield
    finally:
        for module in transforming:
            module.finish_loading()


def _fill(
    sources: Sources,
    given: WeightSource,
    dtype: torch.dtype | None = None,
    *,
    shows_progress: bool = False,
) -> None:
    """Copies tensors into parameters that are in the checkpoint's layout.

    dtype: what the tensors are rounded to before; None converts them straight to the parameters'
        dtype, which may be wider than the model's.
    """
    total_bytes = sum(given.header(name).num_bytes for name in sources)
    with LoadingProgress(total_bytes, is_shown=shows_progress) as progress:
        for name, tensor in given.tensors(set(sources)):
            param, part = sources[name]
            rounded = tensor if dtype is None else _Rounded(tensor, dtype)
            _weight_loader(param)(param, rounded, part)
            progress.add(given.header(name).num_bytes)


def _checked(model: Parameterized, given: WeightSource, packed_modules: PackedModules) -> Sources:
    """Returns what `check_tensors` does, once a tied head, if there is one, is found equal."""
    sources = check_tensors(model, given, packed_modules)
    is_tied = LM_HEAD not in sources
    if is_tied and {LM_HEAD, EMBEDDING} <= given.names and not has_equal_head(given):
        raise ValueError(
            f"{given.label}: {LM_HEAD} differs from {EMBEDDING}, but the model ties them; "
            "load such a checkpoint with a new LLM"
        )
    return sources


def check_tensors(
    model: Parameterized, given: WeightSource, packed_modules: PackedModules
) -> Sources:
    """Returns, by checkpoint tensor name, the parameter that it fills and which part of it.

    Raises `ValueError` if the tensors are not those that the model expects. The parameters need no
    memory.
    """
    sources = _sources(model, packed_modules, given.names)
    _check_names(given, set(sources))
    for name, (param, part) in sources.items():
        header, expected = given.header(name), _weight_loader(param).source_shape(param, part)
        problem = None
        if list(header.shape) != expected:
            problem = f"its shape is {list(header.shape)}, the config asks for {expected}"
        elif header.dtype not in ITEM_BYTES:
            problem = f"dtype {header.dtype} is not supported, as quantized checkpoints have it"
        if problem is not None:
            raise ValueError(f"{given.label}: cannot load tensor {shown(name)}: {problem}")
    return sources


def _sources(model: Parameterized, packed_modules: PackedModules, available: Set[str]) -> Sources:
    sources: Sources = {}
    for param_name, param in model.named_parameters():  # yields tied parameters once
        loader = _weight_loader(param)
        if isinstance(loader, NamesTensors):
            names = loader.tensor_names(param_name, param, available)
            sources |= {name: (param, part) for name, part in names.items()}
            continue
        components = param_name.split(".")
        packed = next((i for i, c in enumerate(components) if c in packed_modules), None)
        if packed is None:
            sources[param_name] = (param, None)
            continue
        for part in packed_modules[components[packed]]:
            name = ".".join([*components[:packed], part, *components[packed + 1 :]])
            sources[name] = (param, part)
    return sources


def _check_names(given: WeightSource, expected: set[str]) -> None:
    """Raises `ValueError` if the source lacks an expected tensor or has an unknown one."""
    missing = expected - given.names
    if missing:
        raise ValueError(
            f"{given.label} lacks tensors that its config asks for: {_summary(missing)}"
        )
    unknown = given.names - expected
    unknown -= set() if LM_HEAD in expected else {LM_HEAD}  # if tied, a copy of the embedding
    if unknown:
        raise ValueError(
            f"{given.label} has tensors that its architecture does not know: "
            f"{_summary(unknown)}; quantized or adapter checkpoints are not supported"
        )


def _summary(names: set[str]) -> str:
    """Returns the first three names in order, and how many more there are."""
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
