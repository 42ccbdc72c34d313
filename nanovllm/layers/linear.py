"""Linear layers whose weights are split over tensor-parallel ranks.

Column: output features are split, the result stays split. Row: input features are split, every rank
has a summand of the result, for the norm that follows to sum. Weights are [output features, input
features].
"""

import platform
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.activation import silu_and_mul
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.host_memory import host_memory
from nanovllm.utils.loader import Shard, WeightLoader, set_weight_loader

KEPT_MEMORY = 0.25  # of the host's, for others and the K/V pool


class Product(Protocol):
    """A way to multiply few rows, of kernels/linear.py."""

    @property
    def is_gated(self) -> bool: ...

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [t, size], weight [n, size] -> [t, n], or partial sums of it, fp32 [..., t, n], or if
        `is_gated` SiLU(gate) * up of it, [t, n / 2]"""
        ...


# Largest number of rows, and how to multiply those; ascending. None is torch's own way.
Products = tuple[tuple[int, Product | None], ...]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T (+ bias), as x; the weight may be `reordered`."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if x.dtype != weight.dtype:
        bias = None if bias is None else bias.to(weight.dtype)
        return linear(x.to(weight.dtype), weight, bias).to(x.dtype)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


def reordered(weight: nn.Parameter) -> nn.Parameter:
    """A copy in oneDNN's own layout, in which CPUs multiply small batches about twice as fast;
    `to_dense()` undoes it. In fp32 where a CPU lacks instructions for half precision, which makes
    the product several times as fast, if there is memory to spare. Else, if oneDNN cannot multiply
    in half precision at all, the weight itself."""
    dtype = weight.dtype
    if weight.device.type != "cpu" or not _has_onednn():
        return weight
    data: torch.Tensor = weight
    if (
        weight.itemsize == 2
        and not _has_instructions(dtype)
        and _has_memory_for(8 * weight.numel())
    ):
        data = weight.float()  # two copies for a moment
    elif not _can_multiply(dtype):
        return weight
    return nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(data), requires_grad=False)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


def _has_memory_for(num_bytes: int) -> bool:
    memory = host_memory()
    return memory.available - num_bytes > KEPT_MEMORY * memory.total


def _can_multiply(dtype: torch.dtype) -> bool:
    """Whether oneDNN can on this CPU, in this dtype."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype, of half precision, rather than to convert to fp32,
    as it does with bf16 on CPUs whose AVX-512 is without."""
    has_bf16 = True
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        # Not there before torch 2.5.
        has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)()
    return has_bf16 and _can_multiply(dtype)


class TunableLinear(nn.Module):
    """y = x W^T (+ bias), on a GPU for few rows by the fastest of `products`."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    products: Products = ()
    leaves_partial_sums: ClassVar[bool] = False  # whether y may be summands of it: see `RMSNorm`
    is_gated: ClassVar[bool] = False  # whether SiLU(gate) * up follows

    @property
    def is_tunable(self) -> bool:
        return self.weight.is_cuda and self.weight.itemsize == 2 and self.bias is None

    def finish_loading(self) -> None:
        self.weight = reordered(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.products:
            return self.multiply(x, None)
        product = next((product for limit, product in self.products if len(x) <= limit), None)
        return self.multiply(x, product)

    def multiply(self, x: torch.Tensor, product: Product | None) -> torch.Tensor:
        """The result for x [..., size], by this way to multiply; None is torch's own."""
        if product is None:
            return linear(x, self.weight, self.bias)
        return product.multiply(x, self.weight)


class MergedColumnParallelLinear(TunableLinear):
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
            share, first = self._share(group, name, size)
            shards[name] = Shard(full=size, source=first, target=offset, size=share)
            offset += share
        self.weight = nn.Parameter(torch.empty(offset, input_size))
        self.bias = nn.Parameter(torch.empty(offset)) if bias else None
        for param in self.parameters():
            set_weight_loader(param, WeightLoader(shards))

    def _share(self, group: TPGroup, name: str, size: int) -> tuple[int, int]:
        """This rank's number of output features of a part, and the first of them."""
        share = group.share(size, f"output features of {name}")
        return share, group.rank * share


class GatedLinear(MergedColumnParallelLinear):
    """SiLU(gate) * up of an input's gate and up projections, [..., size / group.size]."""

    is_gated = True

    def __init__(self, group: TPGroup, input_size: int, size: int) -> None:
        super().__init__(group, input_size, {"gate_proj": size, "up_proj": size})

    def multiply(self, x: torch.Tensor, product: Product | None) -> torch.Tensor:
        out = super().multiply(x, product)
        return out if product is not None and product.is_gated else silu_and_mul(out)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections as one; the result splits into q | k | v.

    With fewer K/V heads than ranks each is held by several ranks: those of its query heads.
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


class RowParallelLinear(TunableLinear):
    """This rank's summand of y = x W^T (+ bias), x and W being split along the input features; rank
    0's has the bias. Of few rows it may be several summands, fp32 [n, ...]."""

    leaves_partial_sums = True

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

    def multiply(self, x: torch.Tensor, product: Product | None) -> torch.Tensor:
        if product is None:
            return linear(x, self.weight, self.bias if self.group.rank == 0 else None)
        return super().multiply(x, product)
