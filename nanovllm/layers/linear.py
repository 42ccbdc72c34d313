"""Linear layers, most of which split their weights over tensor-parallel ranks.

Replicated: every rank computes the whole result. Column: output features are split, the result
stays split. Row: input features are split, every rank has a summand of the result, for the norm
that follows to sum. Weights are [output features, input features].
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.cpu_weights import arranged, arranged_bias, converted, multiply, plain
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import Shard, WeightLoader, set_weight_loader


class Matmul(Protocol):
    """A kernel that multiplies few tokens by a weight; kernels/matmul.py has them."""

    @property
    def has_silu_epilogue(self) -> bool:
        """Whether the result is SiLU(gate) * up of the product."""
        ...

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [t, size], weight [n, size] -> x W^T, [t, n]; its split-K partial sums, fp32
        [split_k, t, n]; or with the SiLU epilogue [t, n / 2]."""
        ...


# (most tokens, the matmul for so many), ascending; None is torch's own matmul.
MatmulTable = tuple[tuple[int, Matmul | None], ...]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x W^T (+ bias) by torch, or by what serves the layout of a CPU's weight."""
    return multiply(x, weight, bias) if weight.is_cpu else F.linear(x, weight, bias)


class Linear(nn.Module):
    """y = x W^T (+ bias).

    matmuls: what few tokens are multiplied by while CUDA graphs are captured; else it is empty.
    On a CPU the weight is kept in the layout of cpu_weights.py between loads.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    matmuls: MatmulTable = ()
    # Whether a norm follows, which adds up the partial sums of split-K: see `RMSNorm`.
    can_leave_partial_sums: ClassVar[bool] = False
    is_gated: ClassVar[bool] = False  # whether the result is SiLU(gate) * up of the product

    @property
    def is_tunable(self) -> bool:
        return self.weight.is_cuda and self.weight.itemsize == 2 and self.bias is None

    def start_loading(self) -> None:
        self.weight = plain(self.weight)
        if self.bias is not None:
            self.bias = converted(self.bias, self.weight.dtype)

    def finish_loading(self) -> None:
        self.weight = arranged(self.weight)
        if self.bias is not None:
            self.bias = arranged_bias(self.bias, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., n]"""
        if not self.matmuls:
            return self.multiply(x, None)
        return self.multiply(x, next((m for most, m in self.matmuls if len(x) <= most), None))

    def multiply(self, x: Tensor, matmul: Matmul | None) -> Tensor:
        """Computes the layer's result by this matmul; None is torch's own."""
        if matmul is None:
            return linear(x, self.weight, self.bias)
        return matmul(x, self.weight)


class ReplicatedLinear(Linear):
    """A projection that every rank computes whole, [..., n], from its copy of the weight."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None


class ColumnParallelLinear(Linear):
    """A projection whose output features are split: this rank's share, [..., n / group.size]."""

    def __init__(
        self, group: TPGroup, input_size: int, output_size: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        share, first = self._share(group, "the projection", output_size)
        shard = Shard(full=output_size, source=first, target=0, size=share)
        self._add_parameters(input_size, {None: shard}, bias)

    def _share(self, group: TPGroup, name: str, size: int) -> tuple[int, int]:
        """Returns how many output features of a part this rank has, and the first of them."""
        share = group.share(size, f"output features of {name}")
        return share, group.rank * share

    def _add_parameters(
        self, input_size: int, shards: Mapping[str | None, Shard], bias: bool
    ) -> None:
        """Makes the weight and the bias that `shards` fill, one after the other."""
        share = sum(shard.size for shard in shards.values())
        self.weight = nn.Parameter(torch.empty(share, input_size))
        self.bias = nn.Parameter(torch.empty(share)) if bias else None
        for param in self.parameters():
            set_weight_loader(param, WeightLoader(shards))


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel projections of one input, computed as one matmul.

    parts: checkpoint module name -> its output features over all ranks. The result is the
    concatenation of this rank's shares, [..., sum(parts) / group.size].
    """

    def __init__(
        self, group: TPGroup, input_size: int, parts: dict[str, int], *, bias: bool = False
    ) -> None:
        Linear.__init__(self)
        shards: dict[str | None, Shard] = {}
        offset = 0
        for name, size in parts.items():
            share, first = self._share(group, name, size)
            shards[name] = Shard(full=size, source=first, target=offset, size=share)
            offset += share
        self._add_parameters(input_size, shards, bias)


class GatedLinear(MergedColumnParallelLinear):
    """The gate and up projections of SwiGLU and their SiLU(gate) * up, [..., size / group.size]."""

    is_gated = True

    def __init__(self, group: TPGroup, input_size: int, size: int, *, bias: bool = False) -> None:
        super().__init__(group, input_size, {"gate_proj": size, "up_proj": size}, bias=bias)

    def multiply(self, x: Tensor, matmul: Matmul | None) -> Tensor:
        out = super().multiply(x, matmul)
        return out if matmul is not None and matmul.has_silu_epilogue else silu_and_mul(out)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections as one matmul; the result is q | k | v.

    With fewer K/V heads than ranks, several ranks hold the same head: those with its query heads.
    """

    def __init__(
        self,
        group: TPGroup,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
    ) -> None:
        self.num_heads = group.share(num_heads, "num_attention_heads")
        if num_kv_heads % group.size and group.size % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads={num_kv_heads} and tensor_parallel_size={group.size} do not "
                "divide one another"
            )
        self.num_kv_heads = max(num_kv_heads // group.size, 1)
        self.head_dim = head_dim
        self.num_replicas = max(group.size // num_kv_heads, 1)
        kv_size = num_kv_heads * head_dim
        parts = {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(group, hidden_size, parts, bias=bias)

    def _share(self, group: TPGroup, name: str, size: int) -> tuple[int, int]:
        if name == "q_proj":
            return super()._share(group, name, size)
        share = self.num_kv_heads * self.head_dim
        return share, group.rank // self.num_replicas * share


class RowParallelLinear(Linear):
    """This rank's summand of y = x W^T (+ bias): x and W are split along the input features.

    Only rank 0 adds the bias. A split-K matmul leaves the summand as partial sums, fp32
    [split_k, t, n]; the norm that follows adds up both kinds of sums.
    """

    can_leave_partial_sums = True

    def __init__(
        self, group: TPGroup, input_size: int, output_size: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.group = group
        share = group.share(input_size, "input features")
        shard = Shard(full=input_size, source=group.rank * share, target=0, size=share)
        self.weight = nn.Parameter(torch.empty(output_size, share))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None
        set_weight_loader(self.weight, WeightLoader({None: shard}, dim=1))

    def multiply(self, x: Tensor, matmul: Matmul | None) -> Tensor:
        if matmul is None:
            return linear(x, self.weight, self.bias if self.group.rank == 0 else None)
        return super().multiply(x, matmul)
