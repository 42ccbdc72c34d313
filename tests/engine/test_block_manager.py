"""Tests the block manager: prefix cache, order of reuse, growth, and the cost of a call."""

import copy
from array import array
from unittest import mock

import pytest
import xxhash

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager, chain_hash
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BS = 4


def make_manager(num_blocks: int) -> BlockManager:
    return BlockManager(num_blocks, BS, enable_prefix_caching=True)


def make_seq(token_ids: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=1000)
    return Sequence(0, array("q", token_ids), params, max_model_len=10**6, seed=0)


def admit(manager: BlockManager, token_ids: list[int]) -> Sequence:
    """Returns a new sequence that holds its blocks and has not computed any token yet."""
    seq = make_seq(token_ids)
    assert manager.allocate(seq)
    return seq


def serve(manager: BlockManager, token_ids: list[int]) -> Sequence:
    """Returns a sequence that holds its blocks, all of them computed and published."""
    seq = admit(manager, token_ids)
    manager.publish(seq, len(token_ids))
    return seq


def serve_and_free(manager: BlockManager, token_ids: list[int]) -> list[int]:
    """Computes, publishes and frees the blocks of a sequence, and returns their ids."""
    seq = serve(manager, token_ids)
    block_table = seq.block_table
    manager.free(seq)
    return block_table


def tokens(first: int, num_blocks: int, num_more: int = 1) -> list[int]:
    """Returns distinct ids from `first` on, which fill `num_blocks` blocks and `num_more` slots."""
    return list(range(first, first + num_blocks * BS + num_more))


def num_hits(manager: BlockManager, token_ids: list[int]) -> int:
    """Counts the cached blocks that a prompt finds, and leaves them free, most recently freed."""
    seq = admit(manager, token_ids)
    manager.free(seq)
    return seq.num_computed_tokens // BS


def test_a_hash_stands_for_the_whole_prefix() -> None:
    data = b"".join(number.to_bytes(8, "little") for number in (2**64 - 1, 1, 2))
    assert chain_hash(2**64 - 1, [1, 2]) == xxhash.xxh64_intdigest(data)
    assert len({chain_hash(0, [1, 2]), chain_hash(0, [2, 1]), chain_hash(1, [1, 2])}) == 3


def test_a_computed_prefix_is_found() -> None:
    manager = make_manager(100)
    first = serve(manager, tokens(0, 3, 2))
    same = admit(manager, tokens(0, 3, 2))
    assert same.block_table[:3] == first.block_table[:3]
    assert same.block_table[3] != first.block_table[3], "a partial block is not shared"
    assert same.num_computed_tokens == 3 * BS
    other = admit(manager, tokens(0, 2, 0) + tokens(50, 2))
    assert other.block_table[:2] == first.block_table[:2]
    assert num_hits(manager, tokens(BS, 2)) == 0, "the same tokens after another prefix"
    manager.check_integrity([first, same, other])


def test_a_block_is_found_only_once_published() -> None:
    manager = make_manager(100)
    seq = admit(manager, tokens(0, 3))
    assert num_hits(manager, tokens(0, 3)) == 0
    manager.publish(seq, 2 * BS - 1)
    assert num_hits(manager, tokens(0, 3)) == 1
    manager.publish(seq, 3 * BS)
    assert num_hits(manager, tokens(0, 3)) == 3


@pytest.mark.parametrize(("num_tokens", "hits"), [(BS, 0), (BS + 1, 1), (2 * BS, 1)])
def test_a_hit_never_covers_the_last_token(num_tokens: int, hits: int) -> None:
    manager = make_manager(100)
    serve(manager, tokens(0, 4))
    assert num_hits(manager, tokens(0, 4)[:num_tokens]) == hits


def test_blocks_filled_by_decode_are_found() -> None:
    manager = make_manager(100)
    seq = serve(manager, [1, 2, 3])
    for token_id in (4, 5, 6, 7, 8):
        seq.token_ids.append(token_id)
        seq.num_tokens += 1
        if manager.growing([seq]):
            manager.append_block(seq)
        manager.publish(seq, len(seq.token_ids))
    assert num_hits(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 2


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "needs"), [(BS - 1, 1, False), (BS, 1, True), (BS + 1, 2, False)]
)
def test_a_block_is_needed_when_blocks_needed_exceed_blocks_held(
    num_tokens: int, num_blocks: int, needs: bool
) -> None:
    manager = make_manager(100)
    seq = admit(manager, tokens(0, 0, num_tokens))
    assert len(seq.block_table) == num_blocks
    assert manager.growing([seq]) == []
    seq.num_tokens += 1  # the prefill samples this token, the first decode computes it
    assert manager.growing([seq]) == [seq] * needs


def test_reuse_takes_the_least_recently_freed_and_tails_before_prefixes() -> None:
    manager = make_manager(7)
    first = serve_and_free(manager, tokens(0, 2))
    second = serve_and_free(manager, tokens(100, 2))
    assert first == [0, 1, 2]
    assert second == [2, 3, 4], "nothing can be found in the block of a last token"
    seq = admit(manager, tokens(200, 6))  # unused blocks are taken before cached ones
    assert seq.block_table == [4, 5, 6, 1, 0, 3, 2]
    manager.check_integrity([seq])


def test_blocks_with_nothing_to_find_are_reused_at_once() -> None:
    """The block that was freed last is reused first because its memory is warm, whereas the memory
    of a block that was never used has yet to be mapped."""
    manager = BlockManager(100, BS, enable_prefix_caching=False)
    for _ in range(3):
        assert serve_and_free(manager, tokens(0, 3)) == [0, 1, 2, 3]
    one, two = admit(manager, tokens(0, 1)), admit(manager, tokens(0, 1))
    manager.free(two)
    manager.free(one)
    assert admit(manager, tokens(0, 2)).block_table == [0, 1, 2]


def test_a_hit_revives_a_free_block() -> None:
    manager = make_manager(3)
    first, second = (serve_and_free(manager, tokens(i, 1)) for i in (0, 100))
    revived = admit(manager, tokens(0, 1))
    assert revived.block_table == [first[0], second[1]]
    assert manager.num_free_blocks == 1
    manager.check_integrity([revived])
    manager.free(revived)
    rest = admit(manager, tokens(200, 2))
    assert rest.block_table == [second[1], second[0], first[0]], "as recent as its last use"
    manager.check_integrity([rest])


def test_reuse_drops_a_hash_if_the_entry_points_at_that_block() -> None:
    manager = make_manager(2)
    serve_and_free(manager, tokens(0, 1))
    serve_and_free(manager, tokens(100, 1))
    assert num_hits(manager, tokens(0, 1)) == 0


def test_reuse_keeps_a_hash_if_the_entry_points_at_a_twin() -> None:
    manager = make_manager(4)
    twins = [admit(manager, tokens(0, 1)) for _ in range(2)]
    for seq in twins:  # the second sequence's entry replaces the first one's
        manager.publish(seq, BS)
    for seq in twins:
        manager.free(seq)
    manager.free(admit(manager, tokens(100, 1)))  # takes the blocks of the first sequence
    assert num_hits(manager, tokens(0, 1)) == 1
    manager.check_integrity([])


def test_twins_share_what_follows() -> None:
    manager = make_manager(100)
    first, second = (admit(manager, tokens(0, 2)) for _ in range(2))
    manager.publish(first, BS)
    manager.publish(second, BS)
    manager.publish(first, 2 * BS)
    assert num_hits(manager, tokens(0, 2)) == 2, "a prefix of one twin, then a block of the other"


def test_admission_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(5)
    serve_and_free(manager, tokens(0, 2))
    holder = serve(manager, tokens(100, 1))
    seq = make_seq(tokens(0, 3))  # needs two cached and two new blocks, but three are free
    before = copy.deepcopy(vars(manager))
    assert not manager.allocate(seq)
    assert vars(manager) == before
    assert (seq.block_table, seq.num_computed_tokens, seq.num_published_blocks) == ([], 0, 0)
    manager.free(holder)
    assert manager.allocate(seq)


def test_a_hit_on_a_block_in_use_costs_nothing() -> None:
    manager = make_manager(4)
    holder = serve(manager, tokens(0, 2))
    seq = admit(manager, tokens(0, 2))
    assert manager.num_free_blocks == 0
    manager.check_integrity([holder, seq])
    manager.free(holder)
    assert manager.num_free_blocks == 1, "what is shared is still in use"


def test_without_prefix_caching_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(block_manager, "chain_hash")
    manager = BlockManager(100, BS, enable_prefix_caching=False)
    serve_and_free(manager, tokens(0, 3))
    assert num_hits(manager, tokens(0, 3)) == 0


def test_a_hash_chain_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = mock.Mock(wraps=chain_hash)
    monkeypatch.setattr(block_manager, "chain_hash", counted)
    manager = make_manager(4)
    holder = admit(manager, [9])
    seq = make_seq(tokens(0, 3))
    assert not any(manager.allocate(seq) for _ in range(5))
    assert counted.call_count == 3
    manager.free(holder)
    for _ in range(2):  # the second round is a preemption: the hashes of its blocks are kept
        assert manager.allocate(seq)
        manager.publish(seq, len(seq.token_ids))
        manager.free(seq)
    assert counted.call_count == 3


def test_colliding_hashes_never_offer_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "chain_hash", lambda previous, token_ids: 0)
    manager = make_manager(100)
    serve_and_free(manager, tokens(0, 1))
    assert num_hits(manager, tokens(100, 1)) == 0
    assert num_hits(manager, tokens(0, 1)) == 1


def test_a_hit_needs_the_same_tokens_all_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "chain_hash", lambda previous, token_ids: token_ids[-1])
    manager = make_manager(100)
    serve_and_free(manager, [1, 1, 1, 0, 5, 5, 5, 5, 0])
    serve_and_free(manager, [2, 2, 2, 0, 0])  # collides with the hash of the first block above
    assert num_hits(manager, [2, 2, 2, 0, 5, 5, 5, 5, 0]) == 1


def test_no_call_is_as_expensive_as_the_pool_is_large() -> None:
    manager = make_manager(10**15)
    left = serve_and_free(manager, tokens(0, 100))
    seq = serve(manager, tokens(0, 100))
    assert seq.block_table[:100] == left[:100]
    manager.check_integrity([seq])
    assert manager.num_free_blocks == 10**15 - 101


def test_check_integrity_sees_a_leak_and_a_double_use() -> None:
    manager = make_manager(100)
    seq = serve(manager, tokens(0, 2))
    for holders in ([], [seq, seq]):
        with pytest.raises(AssertionError, match="ref counts"):
            manager.check_integrity(holders)
    manager.check_integrity([seq])
