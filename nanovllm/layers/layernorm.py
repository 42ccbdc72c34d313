"""RMSNorm with the residual add that precedes it in a pre-norm decoder."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels import cpu_kernels
from nanovllm.layers.cpu_weights import activation_dtype, converted
from nanovllm.utils.distributed import TPGroup


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    Statistics are in fp32 and rounded to the input's dtype before the weight is applied, as in
    Hugging Face. group: the ranks over which `add_forward` sums its input; None does not sum.
    """

    def __init__(self, size: int, eps: float, group: TPGroup | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.group = group or TPGroup()
        self.weight = nn.Parameter(torch.empty(size))
        self.dtype = self.weight.dtype  # a second load rounds to it as the first did

    def start_loading(self) -> None:
        self.weight = converted(self.weight, self.dtype)

    def finish_loading(self) -> None:
        self.weight = converted(self.weight, activation_dtype(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight  # in fp32 inside

    def add_forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums x over the ranks and adds the residual stream before it normalises.

        x and residual [t, size] -> (norm(x + residual), x + residual). A residual of None counts as
        zeros. Both tensors may be overwritten. On a GPU, x may be partial sums of split-K or of
        experts, [n, t, size]; their sum is rounded before anything else.
        """
        if self.group.size > 1:
            num_tokens, size = x.shape[-2:]
            peers = self.group.peers_for_sum(num_tokens, size * self.weight.itemsize)
            if peers is not None:
                from nanovllm.kernels.all_reduce import all_reduce_add_rms_norm

                return all_reduce_add_rms_norm(x, residual, self.weight, self.eps, peers)
            is_partial = x.dim() == 3
            x = self.group.all_reduce(x.sum(0).to(self.weight.dtype) if is_partial else x)
        if x.is_cuda:
            from nanovllm.kernels.layernorm import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps)
        if residual is None:
            return self(x), x
        if (cpu := cpu_kernels(x)) is not None:
            cpu.add_rms_norm(x, residual, self.weight, self.eps)
            return x, residual
        residual = x + residual
        return self(residual), residual
