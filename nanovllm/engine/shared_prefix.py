"""Finds the leading blocks that sequences of a decode batch share, and plans to read them once.

It knows block tables and lengths, not tokens or tensors: blocks with equal ids hold equal keys. A
plan stays right while its sequences stay in the batch, however far they grow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_BRANCHINGS = 8  # deeper branches of the tree of block tables are ignored: bounds the planning
MIN_KEYS_PER_ITEM = 256
# From so many saved reads of keys on, and this share of all, it pays to read prefixes once: a GPU
# has what few sequences share in its L2 cache. docs/benchmarks/2026-12-01-decode-launches.md
ENOUGH_SAVED = 20_000
ENOUGH_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences whose block tables start with the same blocks.

    members: at least two indices into the batch.
    """

    members: list[int]
    num_blocks: int

    @property
    def num_saved(self) -> int:
        """Returns how many block reads it saves to read the shared blocks once."""
        return (len(self.members) - 1) * self.num_blocks


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What `SharedPrefixes` (utils/context.py) holds, as int32 arrays of fixed sizes.

    items: [max_items, 5]
    members: [num_rows]
    rows: [num_rows, 3]
    num_saved_keys: reads of keys that the plan saves in each step and layer.
    """

    items: npt.NDArray[np.int32]
    members: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    num_saved_keys: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A branching of the tree of block tables.

    depth: leading blocks that all sequences below share.
    ends: those of them that share no more with any other.
    saved: per depth at which a group further up may be open, or 0 for none, the most block reads
        that can be saved below. A sequence saves `depth` reads by joining an open group.
    is_open: likewise, whether a group is opened here for that.
    """

    depth: int
    ends: list[int]
    children: list["_Node"]
    saved: list[int]
    is_open: list[bool]


def pays(num_saved_blocks: int, block_size: int, num_keys: int) -> bool:
    """Returns whether it pays to save so many reads of blocks where `num_keys` keys are read."""
    return num_saved_blocks * block_size >= max(ENOUGH_SAVED, ENOUGH_SHARE * num_keys)


def find_prefix_groups(
    block_tables: Sequence[list[int]], context_lens: Sequence[int], block_size: int
) -> list[PrefixGroup]:
    """Returns disjoint groups of sequences that together save the most block reads.

    Each sequence attends to one shared prefix at most. The block that its last token lies in is
    not shared, as later tokens are written into it.
    """
    sharable = [(length - 1) // block_size for length in context_lens]
    groups: list[PrefixGroup] = []
    for members in _by_block(block_tables, 0, [i for i, n in enumerate(sharable) if n > 0]):
        tables = {i: block_tables[i][: sharable[i]] for i in members}
        root = _node(tables, members, [0])
        _collect(root, 0, groups)
    return groups


def _by_block(
    tables: Sequence[list[int]] | dict[int, list[int]], column: int, members: list[int]
) -> list[list[int]]:
    """Returns the sets of two or more members that have the same block in a column."""
    by_block: dict[int, list[int]] = {}
    for i in members:
        by_block.setdefault(tables[i][column], []).append(i)
    return [same for same in by_block.values() if len(same) > 1]


def _node(tables: dict[int, list[int]], members: list[int], open_depths: list[int]) -> _Node:
    """Returns the tree of members that share a first block.

    open_depths: 0, and the depths of the branchings above.
    """
    # What the first and the last in lexicographic order share, all between them share.
    first = min(tables[i] for i in members)
    last = max(tables[i] for i in members)
    depth = _num_equal(first, last)
    children, ends = [], members
    if len(open_depths) <= MAX_BRANCHINGS:
        longer = [i for i in members if len(tables[i]) > depth]
        below = _by_block(tables, depth, longer)
        children = [_node(tables, same, [*open_depths, depth]) for same in below]
        if below:
            inner = {i for same in below for i in same}
            ends = [i for i in members if i not in inner]
    # One read serves the group that is opened here, and all who join it save one each.
    opened = depth * (len(ends) - 1) + sum(child.saved[-1] for child in children)
    saved, is_open = [], []
    for level, open_depth in enumerate(open_depths):
        joined = open_depth * len(ends) + sum(child.saved[level] for child in children)
        saved.append(max(opened, joined))
        is_open.append(opened > joined)
    return _Node(depth, ends, children, saved, is_open)


def _num_equal(first: list[int], second: list[int]) -> int:
    """Returns how many leading elements are equal, by bisection over slices."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _collect(node: _Node, level: int, groups: list[PrefixGroup]) -> list[int]:
    """Appends the groups below a node, and returns the members that are left for the group that is
    open at `level`, an index of `node.saved`."""
    is_open = node.is_open[level]
    level_below = len(node.saved) if is_open else level
    left = list(node.ends)
    for child in node.children:
        left += _collect(child, level_below, groups)
    if not is_open:
        return left
    if len(left) > 1:
        groups.append(PrefixGroup(left, node.depth))
    return []


def plan_prefixes(
    groups: Sequence[PrefixGroup],
    num_rows: int,
    block_size: int,
    members_per_item: int,
    max_items: int,
    enough_items: int,
) -> PrefixPlan:
    """Cuts groups into items of at most `members_per_item` members each.

    num_rows: size of the batch, padding included.
    max_items: of groups that need more items, those are kept that save most per item.
    enough_items: prefixes are cut into parts until there are about so many items, no further, as
        every part gives partial results that have to be merged.
    """
    by_saving = sorted(
        ((-(-len(group.members) // members_per_item), group) for group in groups),
        key=lambda tiles_and_group: -tiles_and_group[1].num_saved / tiles_and_group[0],
    )
    kept: list[tuple[int, PrefixGroup]] = []  # each with its number of tiles of members
    num_tiles = 0
    for tiles, group in by_saving:
        if num_tiles + tiles <= max_items:
            kept.append((tiles, group))
            num_tiles += tiles
    assert enough_items <= max_items
    keys_per_item = MIN_KEYS_PER_ITEM
    while max(num_tiles, enough_items) < sum(
        tiles * -(-group.num_blocks * block_size // keys_per_item) for tiles, group in kept
    ):
        keys_per_item *= 2

    items: list[tuple[int, ...]] = []
    members: list[int] = []
    rows = [(0, 0, 0)] * num_rows
    for _, group in kept:
        num_keys = group.num_blocks * block_size
        starts = range(0, num_keys, keys_per_item)
        for first in range(0, len(group.members), members_per_item):
            tile = group.members[first : first + members_per_item]
            first_partial = len(items) * members_per_item
            for i, row in enumerate(tile):
                rows[row] = num_keys, first_partial + i, len(starts)
            for start in starts:
                end = min(start + keys_per_item, num_keys)
                items.append((len(members), len(tile), tile[0], start, end))
            members += tile
    items += [(0,) * 5] * (max_items - len(items))
    members += [0] * (num_rows - len(members))
    return PrefixPlan(
        np.array(items, np.int32),
        np.array(members, np.int32),
        np.array(rows, np.int32),
        num_saved_keys=sum(group.num_saved for _, group in kept) * block_size,
    )
