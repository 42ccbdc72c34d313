"""Tests how the inputs of decode steps are packed."""

import numpy as np
import pytest
import torch

from nanovllm.engine.batch import DecodePart
from nanovllm.engine.cuda_graph import bucket_sizes
from nanovllm.engine.decode_layout import PrefixDecodeLayout, RowsLayout, prefix_graph_sizes
from nanovllm.engine.shared_prefix import PrefixGroup

PART = DecodePart([0, 1, 2], [7, 3, 5], [], 60, [PrefixGroup([0, 2], 3)])


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 500, 512, 1000, 5000])
def test_every_batch_that_has_a_graph_has_one_for_shared_prefixes(max_num_seqs: int) -> None:
    sizes = bucket_sizes(max_num_seqs)
    prefix_sizes = prefix_graph_sizes(sizes)
    assert set(prefix_sizes) <= set(sizes)
    assert sizes == sorted(set(sizes)), "none beyond the last"
    assert prefix_sizes[-1] == sizes[-1] == min(max_num_seqs, 2048)


def test_rows_are_padded() -> None:
    layout = RowsLayout(4)
    assert layout.holds(PART)
    assert not RowsLayout(2).holds(PART)
    assert layout.pack(PART).tolist() == [7, 3, 5, -1]
    assert layout.padding.tolist() == [-1] * 4


def test_rows_and_plan_travel_together() -> None:
    pytest.importorskip("triton")
    layout = PrefixDecodeLayout(num_rows=5, num_heads=4, num_kv_heads=2, block_size=16)
    packed = layout.pack(PART)
    assert packed.dtype == np.int64
    assert len(packed) == layout.size == len(layout.padding)
    rows, prefixes = layout.unpack(torch.from_numpy(packed))
    assert rows.tolist() == [7, 3, 5, -1, -1]
    shared, _, num_partials = prefixes.rows.T.tolist()
    assert shared == [48, 0, 48, 0, 0]
    assert [n > 0 for n in num_partials] == [True, False, True, False, False]
    first, count, row, start, end = prefixes.items[0].tolist()
    assert (count, row, start, end) == (2, 0, 0, 48)
    assert prefixes.members[first : first + count].tolist() == [0, 2]
    assert (prefixes.items[1:, 1] == 0).all()
    rows, prefixes = layout.unpack(torch.from_numpy(layout.padding))
    assert (rows == -1).all()
    assert not prefixes.items.any()
    assert not prefixes.rows.any()
