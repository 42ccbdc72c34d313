"""Makes sampling states for tests of the samplers."""

from dataclasses import fields, replace

import torch

from nanovllm.utils.sampling_state import SamplingState


def sampling_state(**tensors: torch.Tensor) -> SamplingState:
    """Makes a state of these tensors, [num_rows] each, on their device, with zeros for all
    others."""
    like = next(iter(tensors.values()))
    return replace(SamplingState.zeros(len(like), like.device), **tensors)


def moved(state: SamplingState, device: torch.device) -> SamplingState:
    tensors = {field.name: getattr(state, field.name).to(device) for field in fields(state)}
    return SamplingState(**tensors)
