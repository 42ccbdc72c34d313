"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), pairing j with j + d/2."""

import torch
from torch import Tensor, nn

from nanovllm.layers.rope_scaling import RopeScaling, plain_frequencies


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions; fp32 maths, the result in the input's dtype."""

    cos_sin: Tensor  # fp32 [max_position, head_dim], cos | sin of head_dim / 2 angles each

    def __init__(
        self, head_dim: int, max_position: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        if scaling is None:
            frequencies, factor = plain_frequencies(theta, head_dim), 1.0
        else:
            frequencies = scaling.frequencies(theta, head_dim, max_position)
            factor = scaling.attention_factor
        device = torch.get_default_device()
        # On the CPU whatever the model's device, so that every device rotates by the same angles.
        # An outline, on the meta device, takes no memory for them.
        home = device if device.type == "meta" else torch.device("cpu")
        positions = torch.arange(max_position, dtype=torch.float32, device=home)
        angles = torch.outer(positions, frequencies.to(home))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor)
        self.register_buffer("cos_sin", table.to(device), persistent=False)
        nothing = torch.empty(0)
        self._angles: tuple[Tensor, ...] = (nothing, nothing, nothing)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """positions int64 [t]; x [t, heads, head_dim] -> the same shape, rotated."""
        if self._angles[0] is not positions:  # every layer of a step passes the same object
            cos, sin = self.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
            self._angles = positions, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        _, cos, sin = self._angles  # [t, 1, head_dim]
        first, second = x.chunk(2, dim=-1)
        partner = torch.cat((second, first), dim=-1)
        return torch.addcmul(x * cos, partner, sin).to(x.dtype)  # in fp32, as the angles are
