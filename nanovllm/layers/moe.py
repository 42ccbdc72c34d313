"""A mixture of experts (arXiv:1701.06538): a router sends each token to a few of many small MLPs.

Every rank has all experts, but only a share of each one's intermediate features, so that the ranks
have the same work whatever the router chooses. A rank's result is a summand, for the norm that
follows to sum.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.expert_loader import ExpertLoader
from nanovllm.utils.loader import Shard, set_weight_loader


class Router(ReplicatedLinear):
    """Chooses the `top_k` most probable experts of each token, by a softmax in fp32.

    normalise: whether the weights of a token's experts are divided by their sum.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, normalise: bool) -> None:
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"num_experts_per_tok={top_k} must lie between 1 and num_experts={num_experts}"
            )
        super().__init__(hidden_size, num_experts)
        self.top_k = top_k
        self.normalise = normalise

    @property
    def is_tunable(self) -> bool:
        return False  # on a GPU, its matmul is part of a kernel

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [t, size] -> experts, integers, and their weights, fp32; [t, top_k] each."""
        if x.is_cuda:
            from nanovllm.kernels.moe_routing import choose_experts

            return choose_experts(x, self.weight, self.top_k, normalise=self.normalise)
        probs = self(x).softmax(dim=-1, dtype=torch.float32)
        weights, experts = probs.topk(self.top_k)
        return experts, weights / weights.sum(-1, keepdim=True) if self.normalise else weights


class Experts(nn.Module):
    """The gated MLPs of all experts, each as `GatedMLP` computes it.

    gate_up_proj [num_experts, 2 * n, size], gates then ups; down_proj [num_experts, size, n]; where
    n is this rank's share of the intermediate features.
    """

    def __init__(
        self, group: TPGroup, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        super().__init__()
        share = group.share(intermediate_size, "moe_intermediate_size")
        first = group.rank * share
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * share, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, share))
        gate, up, down = (
            Shard(full=intermediate_size, source=first, target=target, size=share)
            for target in (0, share, 0)
        )
        gate_up = ExpertLoader({"gate_proj": gate, "up_proj": up}, dim=0)
        set_weight_loader(self.gate_up_proj, gate_up)
        set_weight_loader(self.down_proj, ExpertLoader({"down_proj": down}, dim=1))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [t, size], experts and weights [t, top_k] -> [t, size]; on a GPU the summands of it,
        one from each expert of a token, [top_k, t, size]."""
        if x.is_cuda:
            from nanovllm.kernels.experts import run_experts

            return run_experts(x, experts, weights, self.gate_up_proj, self.down_proj)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in experts.unique().tolist():
            tokens, slots = (experts == expert).nonzero(as_tuple=True)
            # Activations are in fp32 where other layers pack weights of half precision.
            gate_up, down = (w[expert].to(x.dtype) for w in (self.gate_up_proj, self.down_proj))
            result = F.linear(silu_and_mul(F.linear(x[tokens], gate_up)), down).float()
            out.index_add_(0, tokens, result * weights[tokens, slots].unsqueeze(1))
        return out.to(x.dtype)


class MixtureOfExperts(nn.Module):
    """The MLP of a layer: the weighted sum of the results of each token's experts.

    Modules have the names of the checkpoint.
    """

    def __init__(
        self,
        group: TPGroup,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        normalise: bool,
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, num_experts, top_k, normalise=normalise)
        self.experts = Experts(group, num_experts, hidden_size, intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.experts(hidden, *self.gate.choose(hidden))
        return out

    def launches(self) -> list[Callable[[], object]]:
        """Returns a call of each GPU kernel that `forward` may need, with next to no work."""
        from nanovllm.kernels.experts import launches

        gate, experts = self.gate, self.experts
        return launches(
            gate.weight,
            experts.gate_up_proj,
            experts.down_proj,
            gate.top_k,
            normalise=gate.normalise,
        )
