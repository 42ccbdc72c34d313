"""Tests the search for shared leading blocks and the plan to read them once."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.engine.shared_prefix import (
    MIN_KEYS_PER_ITEM,
    PrefixGroup,
    find_prefix_groups,
    plan_prefixes,
)

BLOCK_SIZE = 16
# Small ids, so that many tables start alike, and lengths that end anywhere in their blocks.
tables = st.lists(st.integers(0, 1), min_size=0, max_size=5)
sequences = st.tuples(tables, st.integers(1, BLOCK_SIZE))


def tables_and_lens(drawn: list[tuple[list[int], int]]) -> tuple[list[list[int]], list[int]]:
    """Gives every sequence a last block of its own, which holds `filled` tokens."""
    block_tables = [[*table, 100 + i] for i, (table, _) in enumerate(drawn)]
    return block_tables, [len(table) * BLOCK_SIZE + filled for table, filled in drawn]


def partitions(members: list[int]) -> Iterator[list[list[int]]]:
    """Yields all partitions into sets."""
    if not members:
        yield []
        return
    first, rest = members[0], members[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for i, same in enumerate(smaller):
            yield [*smaller[:i], [first, *same], *smaller[i + 1 :]]


def num_saved(block_tables: list[list[int]], members: list[int]) -> int:
    columns = zip(*(block_tables[i][:-1] for i in members), strict=False)
    depth = 0
    for column in columns:
        if len(set(column)) > 1:
            break
        depth += 1
    return depth * (len(members) - 1)


@given(st.lists(sequences, max_size=6))
def test_groups_save_the_most_reads(drawn: list[tuple[list[int], int]]) -> None:
    block_tables, lens = tables_and_lens(drawn)
    groups = find_prefix_groups(block_tables, lens, BLOCK_SIZE)
    most = max(
        sum(num_saved(block_tables, members) for members in partition)
        for partition in partitions(list(range(len(drawn))))
    )
    assert sum(group.num_saved for group in groups) == most


@given(st.lists(sequences, max_size=40))
def test_groups_are_disjoint_and_share_their_blocks(drawn: list[tuple[list[int], int]]) -> None:
    block_tables, lens = tables_and_lens(drawn)
    groups = find_prefix_groups(block_tables, lens, BLOCK_SIZE)
    members = [i for group in groups for i in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        assert len(group.members) > 1
        assert group.num_blocks > 0
        shared = {tuple(block_tables[i][: group.num_blocks]) for i in group.members}
        assert len(shared) == 1
        assert all(group.num_blocks * BLOCK_SIZE < lens[i] for i in group.members)


def test_a_block_that_is_still_written_is_not_shared() -> None:
    """A full last block may be shared only after the next token has a block of its own."""
    tables = [[7, 8], [7, 8]]
    assert find_prefix_groups(tables, [32, 32], 16) == [PrefixGroup([0, 1], 1)]
    assert find_prefix_groups(tables, [16, 32], 16) == []
    longer = [[7, 8, 1], [7, 8, 2]]
    assert find_prefix_groups(longer, [33, 33], 16) == [PrefixGroup([0, 1], 2)]


def test_deep_trees_of_tables_are_cut_off() -> None:
    """The search takes neither exponential time nor the interpreter's whole stack."""
    block_tables = [[*range(i), 10_000 + i] for i in range(2000)]
    lens = [len(table) * BLOCK_SIZE for table in block_tables]
    groups = find_prefix_groups(block_tables, lens, BLOCK_SIZE)
    assert sum(group.num_saved for group in groups) > 2000


@given(
    st.lists(st.tuples(st.integers(2, 40), st.integers(1, 300)), max_size=6),
    st.integers(1, 32),
    st.integers(1, 60),
)
def test_a_plan_covers_each_kept_member_once(
    drawn: list[tuple[int, int]], members_per_item: int, max_items: int
) -> None:
    groups, num_rows = [], 3
    for size, num_blocks in drawn:
        groups.append(PrefixGroup(list(range(num_rows, num_rows + size)), num_blocks))
        num_rows += size
    plan = plan_prefixes(groups, num_rows, BLOCK_SIZE, members_per_item, max_items, max_items)
    assert plan.items.shape == (max_items, 5)
    assert plan.members.shape == (num_rows,)
    assert plan.rows.shape == (num_rows, 3)

    keys_of_partial: dict[int, tuple[int, int, int]] = {}
    for item, (first, count, table_row, start, end) in enumerate(plan.items.tolist()):
        assert count <= members_per_item
        for i, row in enumerate(plan.members[first : first + count].tolist()):
            keys_of_partial[item * members_per_item + i] = row, start, end
            table_group = next(group for group in groups if row in group.members)
            assert table_row in table_group.members
    saved = 0
    for group in groups:
        num_keys = set(plan.rows[group.members, 0].tolist())
        if num_keys == {0}:
            assert not plan.rows[group.members].any()
            continue
        assert num_keys == {group.num_blocks * BLOCK_SIZE}
        saved += group.num_saved * BLOCK_SIZE
        for row in group.members:
            _, first, count = plan.rows[row].tolist()
            parts = [keys_of_partial.pop(first + i * members_per_item) for i in range(count)]
            assert [part[0] for part in parts] == [row] * count
            assert [part[1] for part in parts] == [0, *(part[2] for part in parts[:-1])]
            assert parts[-1][2] == group.num_blocks * BLOCK_SIZE
            assert all(end - start >= MIN_KEYS_PER_ITEM for _, start, end in parts[:-1])
    assert not keys_of_partial
    assert plan.num_saved_keys == saved
    if sum(-(-len(group.members) // members_per_item) for group in groups) <= max_items:
        assert saved == sum(group.num_saved for group in groups) * BLOCK_SIZE


def test_the_groups_that_save_most_are_kept() -> None:
    groups = [PrefixGroup([0, 1], 1), PrefixGroup([2, 3, 4], 50), PrefixGroup([5, 6], 2)]
    plan = plan_prefixes(groups, 8, BLOCK_SIZE, members_per_item=4, max_items=2, enough_items=2)
    assert np.flatnonzero(plan.rows[:, 0]).tolist() == [2, 3, 4, 5, 6]
    assert plan.num_saved_keys == (2 * 50 + 2) * BLOCK_SIZE
