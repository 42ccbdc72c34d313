"""Tests the torch backend's batched decode attention against the formula for each sequence."""

import pytest
import torch

from nanovllm.layers.attention import LayerCache
from nanovllm.layers.attention_backends.torch_sdpa import GROUP_SIZE, TorchBackend, _slices
from nanovllm.utils.context import Context
from tests.helpers.closeness import assert_close

NUM_KV_HEADS, GROUP, HEAD_DIM, SCALE = 2, 3, 8, 0.3


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("num_seqs", [1, GROUP_SIZE, 2 * GROUP_SIZE + 3])
def test_decode_attention_equals_the_formula(num_seqs: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(num_seqs)
    lens = torch.randint(0, 40, (num_seqs,), generator=generator)
    lens[0] = 300
    need = (-(-lens // block_size)).tolist()
    block_ids = torch.randperm(sum(need), generator=generator, dtype=torch.int32).split(need)
    tables = torch.full((num_seqs, max(need) + 1), -(2**30), dtype=torch.int32)
    caches = torch.full((2, sum(need), block_size, NUM_KV_HEADS, HEAD_DIM), float("nan"))
    q = torch.randn(num_seqs, NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    expected = torch.zeros_like(q)
    for i, length in enumerate(lens.tolist()):
        tables[i, : need[i]] = block_ids[i]
        if length:
            kv = torch.randn(2, length, NUM_KV_HEADS, HEAD_DIM, generator=generator)
            padded = torch.full((2, need[i] * block_size, *kv.shape[2:]), float("nan"))
            padded[:, :length] = kv
            caches[:, block_ids[i].long()] = padded.unflatten(1, (need[i], block_size))
            keys, values = kv.repeat_interleave(GROUP, dim=2)
            weights = (torch.einsum("hd,lhd->hl", q[i], keys) * SCALE).softmax(dim=-1)
            expected[i] = torch.einsum("hl,lhd->hd", weights, values)
    context = Context(
        slot_mapping=lens, context_lens=lens.int(), block_tables=tables, max_seqlen_k=300
    )
    backend = TorchBackend()
    out = backend.decode(q, LayerCache(*caches), SCALE, context)
    assert_close(out, expected, num_eps=32)
    next_layers = LayerCache(caches[0], -caches[1])
    out = backend.decode(q, next_layers, SCALE, context)
    assert_close(out, -expected, num_eps=32)


@pytest.mark.parametrize(
    ("lens", "sizes"),
    [
        ([3000] + [21] * 15, [2, 14]),
        ([21] * 40, [16, 16, 8]),
        ([40, 30, 25, 20, 16, 1, 1], [6, 1]),
        ([100, 0, 0, 0], [2, 2]),
        ([0, 0], [2]),
        ([], []),
    ],
)
def test_a_group_has_no_more_padding_than_tokens(lens: list[int], sizes: list[int]) -> None:
    slices = _slices(lens)
    assert [piece.stop - piece.start for piece in slices] == sizes
    indices = [index for piece in slices for index in range(len(lens))[piece]]
    assert indices == list(range(len(lens)))
    for piece in slices:
        group = lens[piece]
        assert max(group) * len(group) <= 2 * sum(group)
