"""The metadata that attention needs about one step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Names the leading keys that decode attention reads once for several rows of a batch.

    Every tensor is on the model's device. n rows in the batch; an "item" is one part of a shared
    prefix together with rows that attend to it, and gives one partial result per such row.

    items: int32 [max_items, 5], (first member, number of members, row, first key, end of keys): the
        members `members[first : first + number]` attend to these keys of `row`'s block table. An
        unused item has 0 members.
    members: int32 [n], the rows of the batch in the order in which items name them.
    rows: int32 [n, 3], (number of shared keys, first partial result, number of partial results):
        the row's partial results lie as far apart as an item has room for members. A row that
        shares nothing, or is padding, has three zeros.
    """

    items: torch.Tensor
    members: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """Per-step attention metadata; an argument of `forward`, never a global.

    Every tensor is on the model's device. n sequences, t tokens in the step.

    slot_mapping: int64 [t], where each token's K/V goes: block id * block size + offset, or -1
        if it is not stored.
    context_lens: int32 [n], cached tokens per sequence, this step's included; 0 for padding rows.
    block_tables: int32 [n, width], block ids of each sequence; columns past its length are
        arbitrary. None in a prefill means that no sequence has a cached prefix, so that attention
        may use the step's fresh K/V.
    max_seqlen_k: an upper bound of `context_lens` that the host knows.
    cu_seqlens_q, cu_seqlens_k: int32 [n + 1], cumulative new and total tokens per sequence;
        cu_seqlens_q is None in a decode step (one token per sequence).
    max_seqlen_q: the most new tokens of a sequence in this step.
    shared_prefixes: in a decode step, the keys that are read once for several sequences; a backend
        may ignore it.
    """

    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor | None
    max_seqlen_k: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 1
    shared_prefixes: SharedPrefixes | None = None
