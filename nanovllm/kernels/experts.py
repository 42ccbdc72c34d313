"""A mixture of experts on a GPU: routing and grouped matmuls with the tiles that suit the batch."""

from collections.abc import Callable
from functools import partial

import torch

from nanovllm.kernels.expert_tiles import tiles_for, tiles_table
from nanovllm.kernels.grouped_matmul import down, gate_up
from nanovllm.kernels.moe_routing import FEW_TOKENS, Routing, choose_experts, sort_by_expert


def run_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
) -> torch.Tensor:
    """Computes the summands of each token's result, one from each of its experts.

    x [t, size]; experts int32 and weights fp32, [t, top_k] each; gate_up_weight
    [num_experts, 2 * n, size], down_weight [num_experts, size, n] -> [top_k, t, size]
    """
    num_experts = len(down_weight)
    tiles = tiles_for(experts.numel() / num_experts, x.dtype)
    routing = sort_by_expert(experts, weights, num_experts, tiles.gate_up.block_m)
    hidden = gate_up(x, gate_up_weight, routing, tiles.gate_up)
    return down(hidden, down_weight, routing, tiles.down)


def launches(
    router_weight: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    top_k: int,
    *,
    normalise: bool,
) -> list[Callable[[], object]]:
    """Returns a call of each kernel that batches of any size need, with next to no work."""
    x = down_weight.new_zeros(1, down_weight.shape[1])
    hidden = down_weight.new_zeros(top_k, down_weight.shape[2])
    weights = x.new_zeros(1, top_k, dtype=torch.float32)
    experts = x.new_zeros(1, top_k, dtype=torch.int32)
    no_tiles = x.new_full((1, 3), -1, dtype=torch.int32)
    routing = Routing(weights, experts.view(-1), no_tiles)
    calls: list[Callable[[], object]] = [
        partial(choose_experts, tokens, router_weight, top_k, normalise=normalise)
        for tokens in (x, x.expand(FEW_TOKENS + 1, -1).contiguous())
    ]
    calls.append(partial(sort_by_expert, experts, weights, len(down_weight), 16))
    for tiles in tiles_table(x.dtype):
        calls.append(partial(gate_up, x, gate_up_weight, routing, tiles.gate_up))
        calls.append(partial(down, hidden, down_weight, routing, tiles.down))
    return calls
