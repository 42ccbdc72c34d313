"""What each row samples with and from: parameters, length and last token, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Per-row tensors that the samplers read and write, [max_num_seqs] each.

    A new sampling parameter adds a tensor here, a column to `columns` and a line to `start`.

    temperatures: fp32; 0 is greedy.
    seeds: int64 holding the 64 bits that key the row's noise.
    context_lens: int64, tokens of the row in the K/V cache, which is the next token's position.
    last_tokens: int64, the token sampled last, which is not in the cache yet.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    context_lens: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def zeros(cls, max_num_seqs: int, device: torch.device) -> "SamplingState":
        """Returns a state of zeros for `max_num_seqs` rows."""

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        return cls(
            temperatures=zeros(torch.float32),
            seeds=zeros(torch.int64),
            context_lens=zeros(torch.int64),
            last_tokens=zeros(torch.int64),
        )

    @staticmethod
    def columns(params: Sequence[SamplingParams], seeds: Sequence[int]) -> list[np.ndarray]:
        """Returns `start`'s arguments for n new rows, on the host: arrays of n 8-byte values."""
        return [
            np.array([float(p.temperature) for p in params]),
            np.array(seeds, dtype=np.uint64).view(np.int64),
        ]

    def start(self, rows: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor) -> None:
        """Sets the parameters of new rows, int64 [n], from `columns` copied to the device."""
        self.temperatures[rows] = temperatures.to(torch.float32)
        self.seeds[rows] = seeds
