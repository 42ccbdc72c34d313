"""Tests decode attention with shared prefixes against the same attention without them."""

import random

import pytest
import torch

from nanovllm.engine.shared_prefix import find_prefix_groups, plan_prefixes
from nanovllm.utils.context import SharedPrefixes
from tests.helpers.kernel_cases import DEVICE, HAS_GPU, assert_near, dtypes, randn, shapes

pytest.importorskip("triton")
from nanovllm.kernels.decode_attention import decode_attention
from nanovllm.kernels.shared_prefix import enough_items, members_per_item

# (members, shared blocks): one group needs more than one item, others lie apart from each other
GROUPS = [(2, 3), (1, 0), (10, 1)] + [(70, 9), (3, 2)] * HAS_GPU


def make_batch(block_size: int, longest_own: int) -> tuple[list[list[int]], list[int], int]:
    """Returns block tables and context lengths in random order, and the number of blocks."""
    rng = random.Random(0)
    num_blocks = 0
    rows: list[tuple[list[int], int]] = [([], 0)] * 2  # padding
    for size, num_shared in GROUPS:
        shared = list(range(num_blocks, num_blocks + num_shared))
        num_blocks += num_shared
        for _ in range(size):
            own_len = rng.randint(1, longest_own)
            own = -(-own_len // block_size)
            table = shared + list(range(num_blocks, num_blocks + own))
            num_blocks += own
            rows.append((table, num_shared * block_size + own_len))
    rng.shuffle(rows)
    return [table for table, _ in rows], [length for _, length in rows], num_blocks


@dtypes
@pytest.mark.parametrize("block_size", [16, 256])
@shapes
def test_shared_prefixes_change_no_result(
    shape: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    if not HAS_GPU and (block_size == 256) != (dtype == torch.float32):
        pytest.skip("the interpreter takes long: one block size for each dtype")
    heads, kv_heads, head_dim = shape
    tables, lens, num_blocks = make_batch(block_size, longest_own=300 if HAS_GPU else 40)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[order[block] for block in table] for table in tables]
    caches = randn(2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype)
    block_tables = torch.full((len(tables), max(map(len, tables)) + 1), -(2**30))
    for i, table in enumerate(tables):
        block_tables[i, : len(table)] = torch.tensor(table)
    block_tables = block_tables.to(DEVICE, torch.int32)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = randn(len(lens), heads + 2, head_dim, dtype=dtype, seed=1)[:, :heads]  # strided

    groups = find_prefix_groups(tables, lens, block_size)
    args = q, *caches, block_tables, context_lens, 0.2
    expected = decode_attention(*args, num_splits=1)
    # In 2 items not all groups fit; of 16 some are unused.
    for max_items, num_splits in [(2, 1), (16, 3)] + [(64, 1), (64, None)] * HAS_GPU:
        plan = plan_prefixes(
            groups,
            num_rows=len(lens),
            block_size=block_size,
            members_per_item=members_per_item(heads // kv_heads),
            max_items=max_items,
            enough_items=min(max_items, enough_items(kv_heads)),
        )
        assert plan.num_saved_keys > 0
        arrays = plan.items, plan.members, plan.rows
        prefixes = SharedPrefixes(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
        out = decode_attention(*args, num_splits, prefixes)
        assert_near(out, expected, dtype)
        assert not out[context_lens == 0].any(), "a padding row must give zeros"


@pytest.mark.gpu
def test_a_captured_launch_follows_its_prefixes() -> None:
    """A graph is replayed with other groups, and with none, than it was captured with."""
    block_size, dtype = 256, torch.bfloat16
    tables, lens, num_blocks = make_batch(block_size, longest_own=300)
    caches = randn(2, num_blocks, block_size, 8, 128, dtype=dtype)
    block_tables = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for i, table in enumerate(tables):
        block_tables[i, : len(table)] = torch.tensor(table)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = randn(len(lens), 16, 128, dtype=dtype, seed=1)
    groups = find_prefix_groups(tables, lens, block_size)
    plans = [
        plan_prefixes(some, len(lens), block_size, members_per_item(2), 16, 16)
        for some in (groups, groups[:1], [])
    ]
    arrays = plans[-1].items, plans[-1].members, plans[-1].rows
    prefixes = SharedPrefixes(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    args = q, *caches, block_tables.to(DEVICE), context_lens, 0.1
    expected = decode_attention(*args)
    decode_attention(*args, prefixes=prefixes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*args, prefixes=prefixes)
    for plan in plans:
        prefixes.items.copy_(torch.from_numpy(plan.items))
        prefixes.members.copy_(torch.from_numpy(plan.members))
        prefixes.rows.copy_(torch.from_numpy(plan.rows))
        out.zero_()
        graph.replay()
        assert_near(out, expected, dtype)
