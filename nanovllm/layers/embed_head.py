"""Token embedding and LM head, their rows (vocabulary entries) split over the ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.linear import linear, reordered
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import Shard, WeightLoader, set_weight_loader


class VocabParallelEmbedding(nn.Module):
    """Rows [first_id, first_id + share) of the embedding; other ids give zeros, for the norm that
    follows to sum over the ranks.

    The shares are equal: the last rank's may be padded with rows that no id has.
    """

    def __init__(
        self,
        group: TPGroup,
        vocab_size: int,
        hidden_size: int,
        weight: nn.Parameter | None = None,
    ) -> None:
        """`weight` is another module's to share, None for an own one."""
        super().__init__()
        self.group = group
        share = -(-vocab_size // group.size)
        self.first_id = group.rank * share
        self.num_ids = max(min(share, vocab_size - self.first_id), 0)  # the rest is padding
        self.weight = nn.Parameter(torch.empty(share, hidden_size)) if weight is None else weight
        self.weight.data[self.num_ids :].zero_()
        shard = Shard(full=vocab_size, source=self.first_id, target=0, size=self.num_ids)
        set_weight_loader(self.weight, WeightLoader({None: shard}))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [t] -> [t, hidden_size]"""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        if input_ids.is_cuda:
            from nanovllm.kernels.embedding import embed_share

            return embed_share(input_ids, self.weight, self.first_id, self.num_ids)
        local = input_ids - self.first_id
        is_mine = (local >= 0) & (local < self.num_ids)
        return F.embedding(local * is_mine, self.weight) * is_mine.unsqueeze(-1)


class ParallelLMHead(VocabParallelEmbedding):
    """Logits over this rank's rows, -inf for padding. A tied head gets the embedding's weight."""

    def finish_loading(self) -> None:
        self.weight = reordered(self.weight)  # a tied embedding keeps its own, to look up rows

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, share], of token ids from `first_id` on"""
        logits = linear(hidden, self.weight)
        if self.num_ids < len(self.weight):
            logits[:, self.num_ids :] = float("-inf")
        return logits
