"""Logit edits, penalties, min_p, top_k, top_p and log probabilities in torch.

What CPUs run, and the reference of kernels/filters.py, logit_edits.py and logprobs.py. It takes one
row after the other, and sorts it.
"""

import torch
from torch import Tensor

from nanovllm.layers.sampler import gumbel_noise
from nanovllm.utils.sampling_state import SamplingState
from nanovllm.utils.special_rows import EditRows, FilterRows, LogitEdits, TopLogprobs


def edit_logits(logits: Tensor, edit: EditRows, history: Tensor, state: SamplingState) -> Tensor:
    """Applies biases, allowed ids, min_tokens and then the penalties.

    logits [n, v]; history int32 [max rows, width], the tokens of each row that has
    penalties, other ids of others -> fp32 [m, v]
    """
    out = logits[edit.index].float()
    for i, (row, edits) in enumerate(zip(edit.rows.tolist(), edit.edits, strict=True)):
        length = int(state.context_lens[row])
        _apply_edits(out[i], edits, is_early=length < int(edit.min_lens[i]))
        if not edit.has_penalties:
            continue
        repetition, presence = edit.repetition[i].float(), edit.presence[i].float()
        tokens = history[row, :length].long()
        if repetition != 1:
            seen = tokens.unique()
            z = out[i, seen]
            out[i, seen] = torch.where(z > 0, z / repetition, z * repetition)
        completion = tokens[edit.num_prompts[i] :]
        ids, counts = completion.unique(return_counts=True)
        out[i, ids] -= presence + edit.frequency[i].float() * counts
    return out


def _apply_edits(z: Tensor, edits: LogitEdits, is_early: bool) -> None:
    is_late_id = edits.ids < 0
    ids = torch.where(is_late_id, ~edits.ids, edits.ids)
    values = z[ids] + edits.biases.float()
    if is_early:
        values = values.masked_fill(is_late_id, float("-inf"))
    if edits.is_only:
        z.fill_(float("-inf"))
    z[ids] = values


def kept_ids(z: Tensor, temperature: float, top_k: int, top_p: float, log_min_p: float) -> Tensor:
    """Returns the ids that min_p, top_k and top_p keep, the most likely first, int64.

    z: fp32 [v], logits before the temperature.
    """
    order = z.sort(descending=True, stable=True).indices  # of equals the lower ids first
    ranked = z[order].double()
    num = int((ranked >= ranked[0] + temperature * log_min_p).sum())
    if top_k > 0:
        num = min(num, top_k)
    if top_p < 1:
        mass = ((ranked[:num] - ranked[0]) / temperature).exp().cumsum(0)
        num = int((mass < top_p * mass[-1]).sum()) + 1
    return order[: max(num, 1)]


def draw_filtered(logits: Tensor, filters: FilterRows, state: SamplingState) -> Tensor:
    """Draws a token for each of the m rows, and stores it as the row's last token.

    logits [n, v] -> ids int64 [m], -1 where a logit is NaN or the largest infinite; the last token
    is then 0. Greedy rows need no filter, which keep the most likely id.
    """
    drawn = torch.empty_like(filters.rows)
    for i, row in enumerate(filters.rows.tolist()):
        z = logits[filters.index[i]].float()
        temperature = float(state.temperatures[row])
        if not z.max().isfinite():
            drawn[i] = -1
        elif temperature > 0:
            limits = int(filters.top_ks[i]), float(filters.top_ps[i]), float(filters.log_min_ps[i])
            ids = kept_ids(z, temperature, *limits).sort().values
            seed, position = state.seeds[row : row + 1], state.context_lens[row : row + 1]
            noisy = z[ids] / temperature + gumbel_noise(seed, position, ids)[0]
            drawn[i] = ids[noisy.argmax()]
        else:
            drawn[i] = z.max(dim=0).indices
    state.last_tokens[filters.rows] = drawn.clamp(min=0)
    return drawn


def top_logprobs(logits: Tensor, index: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    """Returns the log probabilities of an id, and of the `num_top` most likely, in each of m rows.

    logits [n, v]; index int64 [m], the rows of the logits; token_ids int64 [m]
    """
    z, ids = logits[index].float(), token_ids.unsqueeze(1)
    if num_top:
        best = z.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
        ids = torch.cat((ids, best), dim=1)
    return TopLogprobs(ids, z.log_softmax(dim=-1).gather(1, ids))
