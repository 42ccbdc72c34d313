"""What the rows of the runner sample with, as tensors on the model's device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Per-row tensors that the samplers read and write; one entry for each row, [max_num_seqs].

    A new sampling parameter adds a tensor here, a column to `columns` and a line to `start`.

    temperatures: fp32; 0 is greedy.
    seeds: int64 holding the 64 bits that key the row's noise.
    context_lens: int64, tokens of the row in the K/V cache: the position of the next sampled token.
    last_tokens: int64, the token that was sampled last and is not in the cache yet.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    context_lens: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def zeros(cls, max_num_seqs: int, device: torch.device) -> "SamplingState":
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
        """What `start` takes, on the host: arrays of n 8-byte values for n new rows."""
        return [
            np.array([float(p.temperature) for p in params]),
            np.array(seeds, dtype=np.uint64).view(np.int64),
        ]

    def start(self, rows: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor) -> None:
        """Sets what rows int64 [n] sample with, from `columns` on the device."""
        self.temperatures[rows] = temperatures.to(torch.float32)
        self.seeds[rows] = seeds
