"""Tests the kernel that derives a prefill's inputs against the torch operations of `RowState`."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine.batch import Fork, PrefillChunk, PrefillPart, RowInit
from nanovllm.engine.prefill_layout import PrefillLayout, graph_layouts
from nanovllm.engine.row_state import RowState
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.distributed import TPGroup
from tests.helpers.kernel_cases import DEVICE

pytest.importorskip("triton")

LENS = [1, 5, 130, 1, 1500, 33]  # new tokens; the longest takes two programs


def random_part(block_size: int, rng: random.Random) -> PrefillPart:
    """Returns chunks of `LENS` new tokens; some follow a cached prefix, one is cached itself."""
    starts = [0, 3, 7 * block_size, 64, 0, 2]
    chunks = [
        PrefillChunk(start, rng.choices(range(500), k=n), i != 4, is_cached=i == 3, init=None)
        for i, (start, n) in enumerate(zip(starts, LENS, strict=True))
    ]
    rows = rng.sample(range(12), len(chunks))
    longest = max(start + n for start, n in zip(starts, LENS, strict=True))
    return PrefillPart(list(range(len(chunks))), rows, chunks, longest)


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize(("spare_tokens", "spare_seqs"), [(0, 0), (3, 0), (300, 5)])
def test_inputs_equal_those_of_torch(
    block_size: int, spare_tokens: int, spare_seqs: int, tiny_qwen3: Path
) -> None:
    from nanovllm.kernels.prefill_inputs import prefill_inputs

    sizes = {"max_num_seqs": 12, "kvcache_block_size": block_size}
    state = RowState(Config(str(tiny_qwen3), device="cpu", **sizes), TPGroup())
    shape = 12, 4096 // block_size
    state.block_tables = torch.randint(0, 10**6, shape, dtype=torch.int32)
    part = random_part(block_size, random.Random(block_size))
    num_tokens, num_seqs = part.num_tokens, len(part.rows)

    exact = PrefillLayout(num_tokens, num_seqs)
    bounds = {"max_seqlen_q": max(LENS), "max_context_len": part.max_context_len}
    arrays = exact.unpack(torch.from_numpy(exact.pack(part)))
    expected = state.prefill_inputs(arrays, is_paged=True, **bounds)
    expected_lens = state.sampling.context_lens.clone()

    padded = PrefillLayout(num_tokens + spare_tokens, num_seqs + spare_seqs)
    arrays = padded.unpack(torch.from_numpy(padded.pack(part)).to(DEVICE))
    lens = torch.zeros(12, dtype=torch.int64, device=DEVICE)
    positions, slots, context_lens, cu_q, cu_k, tables = prefill_inputs(
        arrays.rows,
        arrays.starts,
        arrays.cu_seqlens_q,
        arrays.cu_seqlens_k,
        arrays.is_stored,
        lens,
        state.block_tables.to(DEVICE),
        block_size=block_size,
        num_tokens=padded.num_tokens,
        max_seqlen_q=max(LENS),
    )
    context = expected.context
    assert torch.equal(arrays.token_ids[:num_tokens].cpu(), expected.input_ids)
    assert torch.equal(positions[:num_tokens].cpu(), expected.positions)
    assert torch.equal(slots[:num_tokens].cpu(), context.slot_mapping)
    assert torch.equal(context_lens[:num_seqs].cpu(), context.context_lens)
    assert torch.equal(lens.cpu(), expected_lens)
    assert context.cu_seqlens_q is not None
    assert context.cu_seqlens_k is not None
    assert torch.equal(cu_q[: num_seqs + 1].cpu(), context.cu_seqlens_q)
    assert torch.equal(cu_k[: num_seqs + 1].cpu(), context.cu_seqlens_k)
    for table, own, length in zip(tables, context.block_tables, context.context_lens, strict=False):
        width = -(-int(length) // block_size)
        assert torch.equal(table[:width].cpu(), own[:width])
    # Padding: tokens that are stored nowhere, and sequences of no tokens.
    assert torch.equal(positions[num_tokens:].cpu(), torch.zeros(spare_tokens, dtype=torch.int64))
    assert (slots[num_tokens:] == -1).all()
    assert (context_lens[num_seqs:] == 0).all()
    assert (cu_q[num_seqs:] == num_tokens).all()
    assert (arrays.sampled_rows[len(part.sampled_rows) :] == -1).all()
    assert arrays.sampled_rows[: len(part.sampled_rows)].tolist() == part.sampled_rows


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(16384, 512), (700, 40), (15, 4), (64, 1)])
def test_layouts_of_graphs_ascend_and_fit_the_engine(budget: int, max_num_seqs: int) -> None:
    layouts = graph_layouts(budget, max_num_seqs)
    sizes = [layout.size for layout in layouts]
    assert sizes == sorted(set(sizes))
    assert all(layout.num_tokens <= budget for layout in layouts)
    assert all(layout.num_seqs <= max_num_seqs for layout in layouts)
    assert bool(layouts) == (budget >= 16)


def test_forks_sample_after_the_token_of_their_prompt() -> None:
    part = random_part(16, random.Random(0))
    init = RowInit(SamplingParams(), 0, [])
    forks = [Fork(2, 90, 13, init, None), Fork(2, 91, 14, init, None), Fork(5, 92, 15, init, None)]
    part = replace(part, forks=forks)
    num_tokens, num_seqs = part.num_tokens, len(part.rows)
    ends = [sum(LENS[: i + 1]) - 1 for i in range(num_seqs)]
    expected = [end for i, end in enumerate(ends) if i != 4] + [ends[2], ends[2], ends[5]]
    assert not PrefillLayout(num_tokens, num_seqs).holds(part)
    for layout in (PrefillLayout(num_tokens, num_seqs, 3), PrefillLayout(num_tokens, 20)):
        assert layout.holds(part)
        arrays = layout.unpack(torch.from_numpy(layout.pack(part)))
        assert arrays.last_tokens[: len(expected)].tolist() == expected
        assert arrays.sampled_rows[: len(expected)].tolist() == part.sampled_rows
        assert (arrays.sampled_rows[len(expected) :] == -1).all()
