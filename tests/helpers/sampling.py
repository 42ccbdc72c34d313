"""Makes sampling states for tests of the samplers."""

from dataclasses import fields, replace

import torch

from nanovllm.utils.sampling_state import SamplingState


def sampling_state(**tensors: torch.Tensor) -> SamplingState:
    """Makes a state of these tensors, [num_rows] each, on their device, with zeros for all
    others."""
    like = next(iter(tensors.values()))
    return replace(SamplingState.zeros(len(like), like.device), **tensors)


def broken_logits(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits [n, vocab], and of which rows no token can be drawn, bool [n]."""
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1] = nan
    logits[2] = -inf
    logits[3, vocab - 1] = nan
    logits[4, 0] = inf
    logits[5, vocab // 2] = torch.tensor(nan).copysign(torch.tensor(-1.0))
    logits[6, 1:] = -inf  # what allowed_token_ids leaves
    logits[7] = 0.0
    logits[8, 3], logits[8, 4] = -inf, inf
    return logits, torch.tensor([0, 1, 1, 1, 1, 1, 0, 0, 1], dtype=torch.bool)


def moved(state: SamplingState, device: torch.device) -> SamplingState:
    tensors = {field.name: getattr(state, field.name).to(device) for field in fields(state)}
    return SamplingState(**tensors)
