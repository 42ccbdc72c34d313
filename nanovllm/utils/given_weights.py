"""Weights that a caller gives instead of a checkpoint."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanovllm.utils.checkpoint import Checkpoint, SliceableTensor, TensorHeader
from nanovllm.utils.shown import shown

SPELLINGS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class GivenWeights:
    """The `WeightSource` of (name, tensor) pairs."""

    label = "weights"

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises `TypeError` or `ValueError` for anything but floating tensors with names of their
        own."""
        self._tensors: dict[str, torch.Tensor] = {}
        for index, pair in enumerate(weights):
            if not isinstance(pair, tuple) or [*map(_kind, pair)] != [str, torch.Tensor]:
                raise TypeError(
                    f"weights must be pairs of name and tensor, got {shown(pair)} at index {index}"
                )
            name, tensor = pair
            if name in self._tensors:
                raise ValueError(f"weights have tensor {shown(name)} twice")
            if not tensor.is_floating_point():
                raise ValueError(
                    f"weights have tensor {shown(name)} in {tensor.dtype}, which is not a floating "
                    "dtype"
                )
            self._tensors[name] = tensor.detach()

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def header(self, name: str) -> TensorHeader:
        tensor = self._tensors[name]
        return TensorHeader(tuple(tensor.shape), SPELLINGS.get(tensor.dtype, str(tensor.dtype)))

    def tensors(self, names: set[str]) -> Iterator[tuple[str, SliceableTensor]]:
        for name in sorted(names):
            yield name, self._tensors[name]

    def save(self, directory: str | Path) -> Checkpoint:
        """Writes the tensors, one by one, where other processes can read them."""
        for number, (name, tensor) in enumerate(self._tensors.items()):
            file = Path(directory) / f"{number}.safetensors"
            save_file({name: tensor.cpu().contiguous()}, file)
        return Checkpoint(directory)


def _kind(value: object) -> type:
    return next((kind for kind in (str, torch.Tensor) if isinstance(value, kind)), object)
