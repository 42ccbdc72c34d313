"""How the inputs of a prefill lie in one array, which travels to the device in one copy."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from nanovllm.engine.batch import PrefillPart
from nanovllm.engine.staging import aligned

MAX_GRAPH_SEQS = 64  # logits are computed for as many
MAX_GRAPH_CONTEXT = 4096  # attention to more keys is spread over programs by their number


class PrefillArrays(NamedTuple):
    """The inputs of a prefill with room for t tokens, n sequences and m samples, int64 each.

    What is left over belongs to sequences of no tokens, whose row is -1, or to no sequence.

    token_ids: [t].
    rows, starts: [n], each sequence's row, and the position of its first token.
    cu_seqlens_q, cu_seqlens_k: [n + 1], cumulative new and total tokens.
    is_stored: [n], 1 if the K/V of the tokens goes to the cache.
    last_tokens, sampled_rows: [m], index of each token after which one is sampled, and the row that
        gets it; 0 and -1 where there are fewer.
    """

    token_ids: Tensor
    rows: Tensor
    starts: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    is_stored: Tensor
    last_tokens: Tensor
    sampled_rows: Tensor


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """The places of `PrefillArrays` with room for `num_tokens` tokens, `num_seqs` sequences, and as
    many samples plus `num_forks`."""

    num_tokens: int
    num_seqs: int
    num_forks: int = 0

    @property
    def size(self) -> int:
        """The number of elements of the packed array."""
        return sum(map(aligned, self._sizes))

    @property
    def padding(self) -> np.ndarray:
        """A packed array without tokens; row 0, which it names, gets length 0."""
        return np.zeros(self.size, dtype=np.int64)

    def holds(self, part: PrefillPart) -> bool:
        return (
            part.num_tokens <= self.num_tokens
            and len(part.rows) <= self.num_seqs
            and len(part.sampled_rows) <= self.num_seqs + self.num_forks
        )

    def pack(self, part: PrefillPart) -> np.ndarray:
        """Returns `part` as one int64 array [size]."""
        starts = np.array([chunk.start for chunk in part.chunks])
        lens = np.array([len(chunk.token_ids) for chunk in part.chunks])
        ends = lens.cumsum()
        is_last = np.array([chunk.is_last for chunk in part.chunks])
        arrays = (
            np.concatenate([chunk.token_ids for chunk in part.chunks]),
            np.array(part.rows),
            starts,
            np.concatenate(([0], ends)),
            np.concatenate(([0], (starts + lens).cumsum())),
            np.array([not chunk.is_cached for chunk in part.chunks]),
            np.concatenate([ends[is_last], ends[[fork.chunk for fork in part.forks]]]) - 1,
            np.array(part.sampled_rows, dtype=np.int64),
        )
        packed = np.zeros(self.size, dtype=np.int64)
        offset = 0
        for name, array, size in zip(PrefillArrays._fields, arrays, self._sizes, strict=True):
            place = packed[offset : offset + size]
            place[: len(array)] = array
            if name in ("rows", "sampled_rows"):
                place[len(array) :] = -1
            elif name.startswith("cu_"):
                place[len(array) :] = array[-1]
            offset += aligned(size)
        return packed

    def unpack(self, packed: Tensor) -> PrefillArrays:
        """packed: int64 [size] -> views of its parts."""
        pieces = packed.split([aligned(size) for size in self._sizes])
        return PrefillArrays(*(p[:size] for p, size in zip(pieces, self._sizes, strict=True)))

    @property
    def _sizes(self) -> tuple[int, ...]:
        t, n, m = self.num_tokens, self.num_seqs, self.num_seqs + self.num_forks
        return t, n, n, n + 1, n + 1, n, m, m


def graph_layouts(max_num_tokens: int, max_num_seqs: int) -> list[PrefillLayout]:
    """Returns the layouts that CUDA graphs are captured for, ascending.

    Larger steps keep the GPU busy for longer than the host takes to launch them.
    """
    sizes = [16, 32, *range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)]
    limits = [size for size in sizes if size <= max_num_tokens]
    return [PrefillLayout(size, min(size, MAX_GRAPH_SEQS, max_num_seqs)) for size in limits]
