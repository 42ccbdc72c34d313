"""Loads weights into a model's parameters, all of them or none.

Each parameter may carry a `WeightLoader` that knows which slices of which checkpoint tensors fill
it on this rank; a parameter without one is copied whole. The tensors that there are and
those that the model expects are compared by name before any data are read; when weights that are in
use are replaced, by shape too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from nanovllm.utils.checkpoint import (
    EMBEDDING,
    LM_HEAD,
    SliceableTensor,
    WeightSource,
    has_equal_head,
)

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
    dim: int = 0

    def __call__(self, param: nn.Parameter, loaded: SliceableTensor, part: str | None) -> None:
        """Copies `part`'s slice of `loaded` into `param`; raises `ValueError` on a wrong shape."""
        self.check(param, loaded, part)
        shard = self.shards[part]
        index = (slice(None),) * self.dim + (slice(shard.source, shard.source + shard.size),)
        param.data.narrow(self.dim, shard.target, shard.size).copy_(loaded[index])

    def check(self, param: nn.Parameter, loaded: SliceableTensor, part: str | None) -> None:
        """Raises `ValueError` unless `loaded` has the shape of the checkpoint's tensor."""
        expected = list(param.shape)
        expected[self.dim] = self.shards[part].full
        if list(loaded.shape) != expected:
            raise ValueError(f"its shape is {list(loaded.shape)}, the config asks for {expected}")


class _Rounded:
    """A tensor in another dtype, converted slice by slice."""

    def __init__(self, tensor: SliceableTensor, dtype: torch.dtype) -> None:
        self.shape = tensor.shape
        self._tensor = tensor
        self._dtype = dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index].to(self._dtype)


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


def load_model(model: Parameterized, source: WeightSource, packed_modules: PackedModules) -> None:
    """Fills every parameter of `model`, which may have been loaded before.

    Raises `ValueError` if the weights and the model do not match exactly. A model made in inference
    mode must be loaded in inference mode.
    """
    with _loading(model):
        _fill(_sources(model, packed_modules), source)


def update_weights(
    model: Parameterized, source: WeightSource, packed_modules: PackedModules, dtype: torch.dtype
) -> None:
    """Replaces the weights of a loaded model, in place where it computes with them as they come.

    dtype: the model's, to which the weights are converted.

    Raises `ValueError` and changes nothing if the weights do not match exactly.
    """
    with _loading(model):
        sources = _sources(model, packed_modules)
        _check(sources, source)
        _fill(sources, source, dtype)


def check_weights(
    model: Parameterized, source: WeightSource, packed_modules: PackedModules
) -> None:
    """Raises the errors of `update_weights`, and changes nothing."""
    with _loading(model):
        _check(_sources(model, packed_modules), source)


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


# By checkpoint tensor name, the parameter that it fills and which part of it.
Sources = dict[str, tuple[nn.Parameter, str | None]]


def _fill(sources: Sources, given: WeightSource, dtype: torch.dtype | None = None) -> None:
    """Copies tensors into parameters that are in their layout; None converts them straight to the
    parameters' dtype, which may be wider than the model's."""
    _check_names(given, set(sources))
    for name, tensor in given.tensors(set(sources)):
        rounded = tensor if dtype is None else _Rounded(tensor, dtype)
        param, part = sources[name]
        with _naming(given, name):
            _weight_loader(param)(param, rounded, part)


def _check(sources: Sources, given: WeightSource) -> None:
    """Raises `ValueError` unless names and shapes are right, and a tied head, if any, is equal."""
    _check_names(given, set(sources))
    for name, tensor in given.tensors(set(sources)):
        param, part = sources[name]
        with _naming(given, name):
            _weight_loader(param).check(param, tensor, part)
    is_tied = LM_HEAD not in sources
    if is_tied and {LM_HEAD, EMBEDDING} <= given.names and not has_equal_head(given):
        raise ValueError(
            f"{given.label}: {LM_HEAD} differs from {EMBEDDING}, but the model ties them; "
            "load such a checkpoint with a new LLM"
        )


@contextmanager
def _naming(given: WeightSource, name: str) -> Iterator[None]:
    """Names the tensor in the errors of the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{given.label}: cannot load tensor {name!r}: {error}") from None


def _sources(model: Parameterized, packed_modules: PackedModules) -> Sources:
    sources: Sources = {}
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
