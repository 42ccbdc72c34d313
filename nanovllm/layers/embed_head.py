"""Token embedding and LM head, their rows (vocabulary entries) split over the ranks."""

import torch
from torch import Tensor, nn

from nanovllm.layers.cpu_weights import PackedWeight, activation_dtype, arranged, look_up, plain
from nanovllm.layers.linear import linear
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import Shard, WeightLoader, set_weight_loader


class VocabParallelEmbedding(nn.Module):
    """This rank's share of the embedding, the ids from `first_id` on; other ids give zeros.

    So the norm that follows can sum over the ranks. The weights of all ranks have one shape: those
    of the last ranks may end in rows that belong to no id.
    """

    def __init__(
        self, group: TPGroup, vocab_size: int, hidden_size: int, weight: nn.Parameter | None = None
    ) -> None:
        """weight: the parameter of another module to share; None makes a new one."""
        super().__init__()
        self.group = group
        share = -(-vocab_size // group.size)
        self.first_id = group.rank * share
        self.num_ids = max(min(share, vocab_size - self.first_id), 0)  # the rest is padding
        self.weight = nn.Parameter(torch.empty(share, hidden_size)) if weight is None else weight
        self.weight.data[self.num_ids :].zero_()
        shard = Shard(full=vocab_size, source=self.first_id, target=0, size=self.num_ids)
        set_weight_loader(self.weight, WeightLoader({None: shard}))
        self.dtype = self.weight.dtype

    def start_loading(self) -> None:
        self.weight = plain(self.weight)

    def finish_loading(self) -> None:
        self.dtype = activation_dtype(self.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [t] -> [t, hidden_size]"""
        if self.group.size == 1:
            return look_up(input_ids, self.weight).to(self.dtype)
        if input_ids.is_cuda:
            from nanovllm.kernels.embedding import embed_share

            return embed_share(input_ids, self.weight, self.first_id, self.num_ids)
        local = input_ids - self.first_id
        is_mine = (local >= 0) & (local < self.num_ids)
        return (look_up(local * is_mine, self.weight) * is_mine.unsqueeze(-1)).to(self.dtype)


class ParallelLMHead(VocabParallelEmbedding):
    """The logits of this rank's share of the ids, -inf for padding.

    embedding: the embedding whose weight a tied head shares; None for a head of its own.
    """

    def __init__(
        self,
        group: TPGroup,
        vocab_size: int,
        hidden_size: int,
        embedding: VocabParallelEmbedding | None = None,
    ) -> None:
        tied = None if embedding is None else embedding.weight
        super().__init__(group, vocab_size, hidden_size, tied)
        self._embedding = (embedding,)  # in a tuple, so that the module has its parameter once

    def start_loading(self) -> None:
        embedding = self._embedding[0]
        if embedding is None:
            self.weight = plain(self.weight)
        else:
            embedding.start_loading()
            self.weight = embedding.weight

    def finish_loading(self) -> None:
        self.weight = arranged(self.weight)
        embedding = self._embedding[0]
        if embedding is not None and isinstance(self.weight, PackedWeight):
            embedding.weight = self.weight  # else it keeps its own, to look up rows

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> logits [n, share] of the token ids from `first_id` on"""
        logits = linear(hidden, self.weight)
        if self.num_ids < logits.shape[1]:
            logits[:, self.num_ids :] = float("-inf")
        return logits
