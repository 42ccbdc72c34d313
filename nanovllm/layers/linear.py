"""Linear layers whose weights are split over tensor-parallel ranks.

Column: output features are split, the result stays split. Row: input features are split, the
partial results are summed over the ranks. Weights are [output features, input features].
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import Shard, WeightLoader, set_weight_loader


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel projections of one input as one product.

    parts: checkpoint module name -> its output features over all ranks. The result is the
    concatenation of the ranks' shares, [..., sum(parts) / group.size].
    """

    def __init__(
        self, group: TPGroup, input_size: int, parts: dict[str, int], *, bias: bool = False
    ) -> None:
        super().__init__()
        shards: dict[str | None, Shard] = {}
        offset = 0
        for name, size in parts.items():
            share = group.share(size, f"output features of {name}")
            shards[name] = Shard(full=size, source=group.rank * share, target=offset, size=share)
            offset += share
        self.weight = nn.Parameter(torch.empty(offset, input_size))
        self.bias = nn.Parameter(torch.empty(offset)) if bias else None
        for param in self.parameters():
            set_weight_loader(param, WeightLoader(shards))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one; the result splits into q | k | v."""

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
        self.num_kv_heads = group.share(num_kv_heads, "num_key_value_heads")
        kv_size = num_kv_heads * head_dim
        parts = {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(group, hidden_size, parts, bias=bias)


class RowParallelLinear(nn.Module):
    """y = x W^T (+ bias) with x and W split along the input features; the bias is added once."""

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.group.rank == 0 else None
        return self.group.all_reduce(F.linear(x, self.weight, bias))
