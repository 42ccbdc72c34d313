"""Sampling by Gumbel-max with counter-based noise.

argmax(logits / T + Gumbel noise) is a draw from softmax(logits / T) (Maddison et al. 2014,
arXiv:1411.0030). The noise is a hash of (request seed, position, token id) alone, so a request's
draws do not depend on its neighbours, on preemption, on chunking, or on who computes them.
"""

import torch
from torch import Tensor, nn

from nanovllm.kernels import cpu_kernels
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.sampling_state import SamplingState

_MASK32 = 0xFFFFFFFF
ROWS_AT_A_TIME = 16  # the noise of a row takes some 50 bytes for each id of the vocabulary


def _mix(x: Tensor, multiplier: int, shift: int) -> Tensor:
    """Applies one multiply-xorshift round to 32-bit values held in int64."""
    x = (x * multiplier) & _MASK32
    return x ^ (x >> shift)


def _hash32(x: Tensor) -> Tensor:
    """Permutes 32-bit values without visible bias: lowbias32 by C. Wellons."""
    x = x & _MASK32
    x = x ^ (x >> 16)
    return _mix(_mix(x, 0x7FEB352D, 15), 0x846CA68B, 16)


def noise_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Derives two 32-bit keys that depend on every bit of seed and position.

    seeds (64 bits as int64) and positions, [n] each -> two keys, int64 [n] each
    """
    low, high = seeds & _MASK32, (seeds >> 32) & _MASK32
    inner = _hash32(low ^ _hash32(positions))
    first = _hash32(high + inner)
    return first, _hash32(first * 0x9E3779B1 + inner)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Computes standard Gumbel noise for each pair of row and token id.

    seeds and positions int64 [n], token_ids int64 [v] -> fp32 [n, v]. The hash is `_hash32` of the
    id xor the first key, with the second key added between its rounds.
    """
    first, second = noise_keys(seeds, positions)
    x = token_ids.unsqueeze(0) ^ first.unsqueeze(1)
    x = x ^ (x >> 16)
    x = _mix(x, 0x7FEB352D, 15)
    x = (x + second.unsqueeze(1)) & _MASK32
    x = _mix(x, 0x846CA68B, 16)
    # In (0, 1), and precise where it is small: that is where the largest noise comes from.
    uniform = (x.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def _max_of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of each row [n] and its first place, int64 [n]."""
    is_plain = logits.dtype == torch.float32 and logits.is_contiguous()
    if is_plain and (cpu := cpu_kernels(logits)) is not None:
        values, index = cpu.max_of_rows(logits)
        return values, index
    largest = logits.max(dim=-1)
    return largest.values, largest.indices


def best_tokens(
    logits: Tensor, rows: Tensor, state: SamplingState, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row; temperature 0 takes the largest logit, of equals the lowest id.

    logits [n, v] of the token ids from `first_id` on; rows int64 [n] of `state`
    -> scores fp32 [n], NaN if a logit is; token ids int64 [n]
    """
    scores, index = _max_of_rows(logits)
    scores = scores.float()
    temperatures = state.temperatures[rows]
    seeds, positions = state.seeds[rows], state.context_lens[rows]
    is_random = (temperatures > 0).nonzero().squeeze(1)
    if len(is_random):
        token_ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        for part in is_random.split(ROWS_AT_A_TIME):
            noise = gumbel_noise(seeds[part], positions[part], token_ids)
            noisy = logits[part].float() / temperatures[part].unsqueeze(1) + noise
            scores[part], index[part] = noisy.max(dim=-1)
    return scores, index + first_id


class Sampler(nn.Module):
    """Samples the next token of rows of the runner's per-row state, and keeps it there.

    Each rank finds the best token of its share of the vocabulary; only those are exchanged, so
    every rank comes to the same token.
    """

    def __init__(self, group: TPGroup, first_id: int) -> None:
        super().__init__()
        self.group = group
        self.first_id = first_id

    def forward(self, logits: Tensor, rows: Tensor, state: SamplingState) -> Tensor:
        """Samples a token for each of `rows` and writes it to `state.last_tokens`.

        logits [n, v] of the token ids from `first_id` on; rows int64 [n], -1 for padding, which
        only CUDA graphs have and whose result is arbitrary -> token ids int64 [n], -1 where a logit
        is NaN or the best score infinite; the row's last token, which the next step may look up
        before anybody notices, is a valid id even then
        """
        if logits.is_cuda:
            from nanovllm.kernels import sampler

            gather = self._gather if self.group.size > 1 else None
            return sampler.sample(logits, rows, state, self.first_id, gather)
        scores, token_ids = best_tokens(logits, rows, state, self.first_id)
        if self.group.size > 1:
            # fp64 holds both exactly; ranks hold ascending ids, and max takes the first of equals.
            pairs = torch.stack((scores.double(), token_ids.double()), dim=-1)
            gathered = self.group.all_gather(pairs)  # [size, n, 2]
            winner = gathered[..., 0].argmax(dim=0, keepdim=True)  # [1, n], a NaN if there is one
            scores, token_ids = gathered.gather(0, winner.unsqueeze(-1).expand(-1, -1, 2))[0].T
            token_ids = token_ids.long()
        state.last_tokens[rows] = token_ids
        return token_ids.masked_fill(~scores.isfinite(), -1)

    def _gather(self, x: Tensor) -> Tensor:
        """Gathers int32 [...] of all ranks -> [size, ...]."""
        peers = self.group.peers
        if peers is not None and peers.holds(-(-2 * x.nbytes // peers.row_bytes), peers.row_bytes):
            from nanovllm.kernels import all_reduce

            return all_reduce.all_gather(x, peers)
        return self.group.all_gather(x)
