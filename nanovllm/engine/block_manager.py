"""Paged K/V bookkeeping: who holds which block, and which blocks the prefix cache can offer.

It deals in block ids; the K/V itself is the runner's. Invariants: a block is free xor in use (its
ref count is the number of tables that hold it); a published block has been filled by an earlier
step, or is filled by the one that is being scheduled before that step attends to anything; a free
block keeps its hash until it is dealt out again.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from nanovllm.engine.batch import BlockCopy
from nanovllm.engine.sequence import NO_BLOCKS, Sequence


def chain_hash(previous: int, token_ids: "array[int] | list[int]") -> int:
    """Hashes a full block together with the hash of the block before it.

    So the result stands for all tokens up to the end of the block.
    """
    digest = xxhash.xxh64(previous.to_bytes(8, "little"))
    digest.update(np.array(token_ids, dtype=np.int64).tobytes())
    return digest.intdigest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The content of a published block; blocks with the same content share one object.

    A hit must agree in its tokens and, by identity of `previous`, in all tokens before them: hashes
    of different prefixes may collide.
    """

    block_hash: int
    token_ids: "array[int]"
    previous: "CachedBlock | None"


class BlockManager:
    """Deals out `num_blocks` blocks of `block_size` tokens.

    The cost of a call grows with the blocks that it touches, not with the pool.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_dealt = 0  # ids from here on have never been used
        self._ref_counts: dict[int, int] = {}  # blocks in use
        self._num_held = 0  # the sum of the ref counts
        self._free_blank: list[int] = []  # with nothing published; the most recently freed last
        # Freed and still published, the least recently freed first.
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._published: dict[int, CachedBlock] = {}  # by block id
        self._block_by_hash: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}  # by hash: other blocks with the same content
        self.num_tokens_asked = 0  # of sequences that got their blocks
        self.num_tokens_found = 0  # of these, by their prefix

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - len(self._ref_counts)

    @property
    def num_shared_reads(self) -> int:
        """How many entries of block tables name a block that another table's entry names as well,
        not counting one of each: what sequences that are read together could save at most."""
        return self._num_held - len(self._ref_counts)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        """Gives `seq` the blocks of all its known tokens, cached ones where there are any.

        It sets the block table and counts the cached tokens as computed. It returns False and
        changes nothing if fewer than `reserve` blocks would stay free.
        """
        assert not seq.block_table
        hits = self._find_cached_blocks(seq)
        num_new = self.blocks_for(len(seq.token_ids)) - len(hits)
        num_revived = sum(block_id not in self._ref_counts for block_id in hits)
        if num_new + num_revived + reserve > self.num_free_blocks:
            return False
        for block_id in hits:
            if block_id not in self._ref_counts:
                del self._free_cached[block_id]
            self._ref_counts[block_id] = self._ref_counts.get(block_id, 0) + 1
        self._num_held += len(hits)
        seq.block_table = hits + [self._take_free_block() for _ in range(num_new)]
        # At least one token is computed, to sample what follows it.
        seq.num_computed_tokens = min(len(hits) * self.block_size, len(seq.token_ids) - 1)
        seq.num_published_blocks = len(hits)
        self.num_tokens_asked += len(seq.token_ids)
        self.num_tokens_found += seq.num_computed_tokens
        return True

    def fork(self, first: Sequence, other: Sequence, reserve: int = 0) -> bool:
        """Gives `other` the full blocks of `first`, whose known tokens are all computed and its own
        too, and a new block for the tokens behind them, whose K/V is to be copied.

        It returns False and changes nothing if fewer than `reserve` blocks would stay free.
        """
        assert not other.block_table
        num_full, num_behind = divmod(first.num_computed_tokens, self.block_size)
        num_new = min(num_behind, 1)
        if num_new + reserve > self.num_free_blocks:
            return False
        shared = first.block_table[:num_full]
        for block_id in shared:
            self._ref_counts[block_id] += 1
        self._num_held += num_full
        other.block_table = shared + [self._take_free_block() for _ in range(num_new)]
        other.num_computed_tokens = first.num_computed_tokens
        other.num_published_blocks = first.num_published_blocks
        other.block_hashes = first.block_hashes
        return True

    def copied_block(self, first: Sequence, other: Sequence) -> BlockCopy | None:
        """Returns the copy that completes the blocks of `other` after `fork`."""
        num_full, num_behind = divmod(first.num_computed_tokens, self.block_size)
        if not num_behind:
            return None
        return BlockCopy(first.block_table[num_full], other.block_table[num_full], num_behind)

    def growing(self, seqs: list[Sequence]) -> list[Sequence]:
        """Returns those that need one more block before all their tokens can be computed."""
        size = self.block_size
        return [seq for seq in seqs if seq.num_tokens > len(seq.block_table) * size]

    def append_block(self, seq: Sequence) -> int:
        assert seq.block_table, "only admitted sequences grow"
        block_id = self._take_free_block()
        seq.block_table.append(block_id)
        return block_id

    def free(self, seq: Sequence) -> None:
        """Gives back all blocks of `seq`, tail first, so that its prefix is reused last."""
        self._num_held -= len(seq.block_table)
        for block_id in reversed(seq.block_table):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                del self._ref_counts[block_id]
                if block_id in self._published:
                    self._free_cached[block_id] = None
                else:
                    self._free_blank.append(block_id)
        seq.block_table = NO_BLOCKS
        seq.num_published_blocks = 0

    def unpublished_blocks(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Returns the blocks that `publish` with the same arguments would offer."""
        return seq.block_table[seq.num_published_blocks : num_tokens // self.block_size]

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Offers the full blocks among the first `num_tokens` tokens of `seq` to later prompts.

        The tokens must be known, and their K/V be written by an earlier step or by the one that is
        being scheduled.
        """
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size
        self._extend_hashes(seq, num_full)
        for index in range(seq.num_published_blocks, num_full):
            block_id, block_hash = seq.block_table[index], seq.block_hashes[index]
            tokens = self._tokens_of(seq, index)
            previous = self._published.get(seq.block_table[index - 1]) if index else None
            if index and previous is None:
                return  # the cache was reset meanwhile: what comes before cannot be found
            twin = self._lookup(block_hash, tokens, previous)
            if twin is None:
                self._published[block_id] = CachedBlock(block_hash, tokens, previous)
                self._block_by_hash[block_hash] = block_id
                self._twins.pop(block_hash, None)  # of other content, should two hashes collide
            else:  # twins share the object, so that chains compare as identical
                self._published[block_id] = self._published[twin]
                self._twins.setdefault(block_hash, []).append(block_id)
        seq.num_published_blocks = max(seq.num_published_blocks, num_full)

    def recover(self, unwritten: Iterable[int]) -> None:
        """Frees all blocks, wherever a method here was cut short; the sequences hold none then.

        unwritten: published blocks whose K/V a failed step has not written, so that they cannot be
            found any more.
        """
        for block_id in unwritten:
            self._published.pop(block_id, None)
        self._ref_counts, self._num_held = {}, 0
        # The least recently freed ones first, as before, then those that were in use.
        order = [*(i for i in self._free_cached if i in self._published), *self._published]
        self._free_cached = OrderedDict.fromkeys(order)
        self._free_blank = [i for i in range(self._num_dealt) if i not in self._published]
        self._block_by_hash, self._twins = {}, {}
        for block_id, cached in self._published.items():
            first = self._block_by_hash.setdefault(cached.block_hash, block_id)
            if first != block_id and self._published[first] is cached:
                self._twins.setdefault(cached.block_hash, []).append(block_id)

    def reset(self) -> None:
        """Makes no block possible to find that is published now."""
        self._published.clear()  # first: should this be cut short, none can be found
        self._free_blank += self._free_cached
        self._free_cached.clear()
        self._block_by_hash.clear()
        self._twins.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts the invariants. `sequences` must include all that hold blocks."""
        held = dict(Counter(block_id for seq in sequences for block_id in seq.block_table))
        assert held == self._ref_counts, "ref counts differ from the block tables"
        assert sum(held.values()) == self._num_held
        known = Counter([*held, *self._free_cached, *self._free_blank])
        assert all(count == 1 for count in known.values()), "a block is free and in use"
        assert known.keys() == set(range(self._num_dealt)), "a block is neither free nor in use"
        assert self._published.keys() >= self._free_cached.keys(), "a block is kept for nothing"
        assert not self._published.keys() & set(self._free_blank), "a block is dealt out too early"
        assert self._num_dealt <= self.num_blocks
        for block_hash, block_id in self._block_by_hash.items():
            cached = self._published[block_id]
            assert cached.block_hash == block_hash, "a hash points at another's block"
            twins = self._twins.get(block_hash, [block_id])
            assert all(self._published[twin] is cached for twin in twins), "twins differ"
        assert self._twins.keys() <= self._block_by_hash.keys(), "twins of nothing"

    def _find_cached_blocks(self, seq: Sequence) -> list[int]:
        """Returns the cached blocks of the longest known prefix of `seq`, maybe all of it.

        Log probabilities of a prompt take the hidden states of all its tokens: none is cached.
        """
        if not self.enable_prefix_caching or seq.prompt_logprobs is not None:
            return []
        num_usable = len(seq.token_ids) // self.block_size
        self._extend_hashes(seq, num_usable)
        hits: list[int] = []
        for index in range(num_usable):
            previous = self._published[hits[-1]] if hits else None
            block_id = self._lookup(seq.block_hashes[index], self._tokens_of(seq, index), previous)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _lookup(
        self, block_hash: int, token_ids: "array[int]", previous: CachedBlock | None
    ) -> int | None:
        block_id = self._block_by_hash.get(block_hash)
        if block_id is None:
            return None
        cached = self._published[block_id]
        return block_id if cached.previous is previous and cached.token_ids == token_ids else None

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        if len(seq.block_hashes) >= num_blocks:
            return
        hashes = list(seq.block_hashes)
        while len(hashes) < num_blocks:
            tokens = self._tokens_of(seq, len(hashes))
            hashes.append(chain_hash(hashes[-1] if hashes else 0, tokens))
        seq.block_hashes = tuple(hashes)

    def _tokens_of(self, seq: Sequence, index: int) -> "array[int]":
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _take_free_block(self) -> int:
        """Returns the free block that is missed least, and counts it as in use.

        First comes the block freed last among those that hold nothing to find, whose memory is the
        warmest; then one never used; then the least recently freed one of the prefix cache.
        """
        if self._free_blank:
            block_id = self._free_blank.pop()
        elif self._num_dealt < self.num_blocks:
            block_id = self._num_dealt
            self._num_dealt += 1
        else:
            block_id, _ = self._free_cached.popitem(last=False)
            self._unpublish(block_id)
        self._ref_counts[block_id] = 1
        self._num_held += 1
        return block_id

    def _unpublish(self, block_id: int) -> None:
        """Makes a block impossible to find; if it has a twin, that one is found in its place."""
        block_hash = self._published.pop(block_id).block_hash
        twins = self._twins.get(block_hash, [])
        if self._block_by_hash.get(block_hash) != block_id:
            if block_id in twins:
                twins.remove(block_id)
        elif twins:
            self._block_by_hash[block_hash] = twins.pop()
        else:
            del self._block_by_hash[block_hash]
        if not twins:
            self._twins.pop(block_hash, None)
