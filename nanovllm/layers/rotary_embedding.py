"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), pairing j with j + d/2."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig


def rope_theta(hf_config: PretrainedConfig) -> float:
    """Returns the base of the rotation frequencies, from wherever transformers keeps it.

    Raises `ValueError` for a scaling that is not implemented: ignoring it would give wrong text.
    """
    params = getattr(hf_config, "rope_parameters", None)  # transformers 5.x
    if params is None:
        params = dict(getattr(hf_config, "rope_scaling", None) or {})  # 4.x
        params["rope_theta"] = getattr(hf_config, "rope_theta", None)
    kind = params.get("rope_type", params.get("type", "default"))
    if kind != "default" or params.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"RoPE parameters {params} are not supported; only rope_type 'default' is")
    if params.get("rope_theta") is None:
        raise ValueError("the checkpoint's config.json has no rope_theta")
    return float(params["rope_theta"])


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions; fp32 maths, the result in the input's dtype."""

    cos_sin: Tensor  # fp32 [max_position, head_dim], cos | sin of head_dim / 2 angles each

    def __init__(self, head_dim: int, max_position: int, theta: float) -> None:
        super().__init__()
        # On the CPU whatever the model's device, so that every device rotates by the same angles.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, 1.0 / theta**exponents)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cos_sin", table.to(torch.get_default_device()), persistent=False)
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
