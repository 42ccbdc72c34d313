"""Fills parameters that stack the weights of all experts of a layer.

Checkpoints have a tensor for each expert and projection, `experts.E.gate_proj.weight`; those that
transformers 5 writes with `save_original_format=False` have the stacked tensors,
`experts.gate_up_proj` and `experts.down_proj`, as the parameters are.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import nn

from nanovllm.utils.checkpoint import SliceableTensor
from nanovllm.utils.loader import Shard


@dataclass(frozen=True, slots=True)
class ExpertLoader:
    """Fills a parameter [num_experts, ...] from slices of the experts' tensors along `dim`, which
    counts from the dimension after the experts.

    shards: by projection, in the order in which a stacked tensor has them.
    """

    shards: Mapping[str, Shard]
    dim: int

    def tensor_names(
        self, param_name: str, param: nn.Parameter, available: Set[str]
    ) -> dict[str, str | None]:
        """Returns the tensors that fill the parameter, by name, and which part each is: an expert's
        projection, such as `3.up_proj`, or None for all of it."""
        if param_name in available:
            return {param_name: None}
        prefix = param_name.rpartition(".")[0]
        parts = [f"{expert}.{name}" for expert in range(len(param)) for name in self.shards]
        return {f"{prefix}.{part}.weight": part for part in parts}

    def source_shape(self, param: nn.Parameter, part: str | None) -> list[int]:
        """Returns the shape of the checkpoint's tensor that holds `part`."""
        shape = list(param.shape)
        if part is None:
            shape[1 + self.dim] = sum(shard.full for shard in self.shards.values())
            return shape
        shape[1 + self.dim] = self.shards[part.partition(".")[2]].full
        return shape[1:]

    def __call__(self, param: nn.Parameter, loaded: SliceableTensor, part: str | None) -> None:
        """Copies `part`'s slice of `loaded` into `param`."""
        if part is None:
            self._copy_stacked(param, loaded)
            return
        expert, _, name = part.partition(".")
        shard = self.shards[name]
        target = param.data[int(expert)].narrow(self.dim, shard.target, shard.size)
        target.copy_(loaded[self._slices(shard.source, shard.size)])

    def _copy_stacked(self, param: nn.Parameter, loaded: SliceableTensor) -> None:
        """Copies a tensor of all experts one by one, so that little host memory is needed."""
        for expert, weight in enumerate(param.data):
            before = 0
            for shard in self.shards.values():
                own = self._slices(before + shard.source, shard.size)
                target = weight.narrow(self.dim, shard.target, shard.size)
                target.copy_(loaded[(slice(expert, expert + 1), *own)][0])
                before += shard.full

    def _slices(self, first: int, size: int) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(first, first + size))
