"""Tests that blocks are offered to other prompts when their step is scheduled, and that the offer
is taken back if the step fails."""

from array import array

import pytest

from nanovllm.engine import shared_prefix
from nanovllm.engine.batch import PrefillChunk, ScheduledBatch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 4
PREFIX = list(range(100, 100 + 5 * BLOCK_SIZE))


def make_scheduler(num_blocks: int = 200, budget: int = 1000, **options: int) -> Scheduler:
    manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": budget, "stop_token_ids": ()}
    return Scheduler(manager, **(sizes | options))  # type: ignore[arg-type]


def add(scheduler: Scheduler, seq_id: int, prompt: list[int], max_tokens: int = 8) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    seq = Sequence(seq_id, array("q", prompt), params, max_model_len=512, seed=0)
    scheduler.add(seq)
    return seq


def schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def chunks(batch: ScheduledBatch) -> list[PrefillChunk]:
    assert batch.prefill is not None
    return batch.prefill.chunks


def complete(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    scheduler.postprocess(batch, [7] * len(batch.sampled_seq_ids))


@pytest.mark.parametrize("num_own", [1, 2, BLOCK_SIZE, 6])
@pytest.mark.parametrize("budget", [1000, 30, 7])
def test_prompts_that_arrive_together_compute_a_shared_prefix_once(
    num_own: int, budget: int
) -> None:
    """The prefix is computed once even if it takes several steps: later prompts wait until all of
    it is scheduled."""
    scheduler, num_prompts = make_scheduler(budget=budget), 16
    for seq_id in range(num_prompts):
        add(scheduler, seq_id, PREFIX + [seq_id] * num_own)
    batches = []
    while scheduler.waiting:
        batches.append(schedule(scheduler))
    assert sum(batch.num_prefilled for batch in batches) == len(PREFIX) + num_prompts * num_own
    for batch in batches:
        complete(scheduler, batch)


def test_identical_prompts_of_full_blocks_compute_their_last_token_each() -> None:
    """It is computed for the sake of the next one; its K/V, which others may read, is kept."""
    scheduler = make_scheduler()
    seqs = [add(scheduler, seq_id, PREFIX) for seq_id in range(8)]
    first, *others = chunks(schedule(scheduler))
    assert (first.start, first.is_cached) == (0, False)
    assert [(c.start, len(c.token_ids), c.is_cached) for c in others] == [
        (len(PREFIX) - 1, 1, True)
    ] * 7
    assert all(seq.block_table == seqs[0].block_table for seq in seqs)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_step_that_fails_takes_back_what_it_had_offered(num_steps: int) -> None:
    """The offers of the failed step and of the steps launched after it are taken back; those of an
    earlier, completed step stay."""
    scheduler = make_scheduler(budget=3 * BLOCK_SIZE)
    add(scheduler, 0, [*PREFIX[: 2 * BLOCK_SIZE], 1])
    complete(scheduler, schedule(scheduler))
    seqs = [add(scheduler, seq_id, [*PREFIX, seq_id]) for seq_id in (1, 2)]
    for _ in range(num_steps):
        schedule(scheduler)
    scheduler.recover()
    scheduler.block_manager.check_integrity(seqs)
    scheduler.abort([0])
    batch = schedule(scheduler)
    assert chunks(batch)[0].start == 2 * BLOCK_SIZE, "only the completed step's blocks are found"


def test_what_an_aborted_request_had_offered_is_taken_back_too() -> None:
    """The blocks of the aborted request are free by then, so later prompts would find them."""
    scheduler = make_scheduler()
    add(scheduler, 0, [*PREFIX, 1])
    schedule(scheduler)
    scheduler.abort([0])
    scheduler.recover()
    scheduler.block_manager.check_integrity([])
    add(scheduler, 1, [*PREFIX, 2])
    assert chunks(schedule(scheduler))[0].start == 0


@pytest.mark.parametrize("number", [2, 4, 5])
def test_an_interrupt_while_blocks_are_offered_leaves_none_of_them(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their step is never launched, so nothing writes their K/V."""
    scheduler = make_scheduler()
    seq = add(scheduler, 0, [*PREFIX, 1])
    manager, calls = scheduler.block_manager, list[int]()
    lookup = manager._lookup

    def interrupted(*args: object) -> int | None:
        if seq.block_table:  # admitted: it is being published
            calls.append(1)
            if len(calls) == number:
                raise KeyboardInterrupt
        return lookup(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(manager, "_lookup", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.schedule()
    scheduler.recover()
    manager.check_integrity([seq])
    assert chunks(schedule(scheduler))[0].start == 0


def test_an_abort_of_a_launched_request_leaves_its_offer() -> None:
    """The launched step runs in spite of the abort, before the step of any request that finds its
    blocks."""
    scheduler = make_scheduler()
    add(scheduler, 0, [*PREFIX, 1])
    batch = schedule(scheduler)
    scheduler.abort([0])
    add(scheduler, 1, [*PREFIX, 2])
    assert chunks(schedule(scheduler))[0].start == len(PREFIX)
    complete(scheduler, batch)


def published_pair(manager: BlockManager) -> tuple[Sequence, Sequence]:
    """Returns two sequences that have computed the same prompt, each in blocks of its own."""
    params = SamplingParams()
    first, second = (
        Sequence(i, array("q", [*PREFIX, 1]), params, max_model_len=99, seed=0) for i in range(2)
    )
    # Both are admitted before either is published, so neither finds the other's blocks.
    for seq in (first, second):
        assert manager.allocate(seq)
    for seq in (first, second):
        manager.publish(seq, len(PREFIX))
    return first, second


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_evicting_one_of_two_twins_leaves_the_other_to_be_found(first_to_go: int) -> None:
    manager = BlockManager(12, BLOCK_SIZE, enable_prefix_caching=True)
    pair = published_pair(manager)
    gone, kept = pair[first_to_go], pair[1 - first_to_go]
    num_held = len(gone.block_table)
    manager.free(gone)
    other = Sequence(2, array("q", range(4 * num_held)), SamplingParams(), max_model_len=99, seed=0)
    assert manager.allocate(other), "it takes all the blocks that were freed"
    manager.check_integrity([kept, other])
    manager.free(other)
    late = Sequence(3, array("q", [*PREFIX, 2]), SamplingParams(), max_model_len=99, seed=0)
    assert manager.allocate(late)
    assert late.block_table[:5] == kept.block_table[:5]


def test_groups_that_share_blocks_are_found_once_per_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_prefix, "ENOUGH_SAVED", 4 * BLOCK_SIZE)
    monkeypatch.setattr(shared_prefix, "ENOUGH_SHARE", 0)
    scheduler = make_scheduler(finds_prefix_groups=True)
    searches: list[int] = []
    find = shared_prefix.find_prefix_groups
    monkeypatch.setattr(
        "nanovllm.engine.prefix_groups.find_prefix_groups",
        lambda tables, *args: searches.append(len(tables)) or find(tables, *args),
    )
    seqs = [add(scheduler, i, [*PREFIX, i], max_tokens=20 - i) for i in range(3)]
    add(scheduler, 3, [1] * 9, max_tokens=30)
    groups = []
    while not scheduler.is_finished():
        batch = schedule(scheduler)
        complete(scheduler, batch)
        if batch.decode:
            groups.append([(g.members, g.num_blocks) for g in batch.decode.prefix_groups])
    members = [batch[0][0] for batch in groups if batch]
    assert members[0] == [0, 1, 2]
    assert members[-1] == [0, 1]
    assert all(batch[0][1] == 5 for batch in groups if batch)
    assert groups[-1] == [], "one is left, which shares with nobody"
    assert searches == [4, 3], "once for each set of sequences"
    assert all(seq.finish_reason == "length" for seq in seqs)


def test_running_sequences_keep_a_reserve_when_another_is_admitted() -> None:
    scheduler = make_scheduler(num_blocks=10, reserved_tokens=3 * BLOCK_SIZE)
    for seq_id in range(3):
        add(scheduler, seq_id, [seq_id] * (2 * BLOCK_SIZE))
    assert schedule(scheduler).sampled_seq_ids == [0, 1], (
        "the third would leave 4 of 6 reserved blocks"
    )


def test_a_reserve_saves_preemptions_in_a_tight_pool() -> None:
    counts = []
    for reserved_tokens in (0, 32):
        scheduler = make_scheduler(num_blocks=100, reserved_tokens=reserved_tokens)
        for seq_id in range(60):
            add(scheduler, seq_id, [seq_id] * (20 + seq_id % 7), max_tokens=20 + seq_id * 11 % 80)
        while not scheduler.is_finished():
            complete(scheduler, schedule(scheduler))
        counts.append(scheduler.num_preemptions)
    assert 2 * counts[1] < counts[0], counts


def test_the_reserve_is_waived_when_nothing_runs() -> None:
    scheduler = make_scheduler(num_blocks=10, reserved_tokens=1000)
    add(scheduler, 0, [1] * 40)
    assert schedule(scheduler).sampled_seq_ids == [0]


def test_a_blocked_head_is_looked_up_again_only_when_blocks_were_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(num_blocks=12)
    short = add(scheduler, 0, [1] * 9, max_tokens=6)
    long = add(scheduler, 1, [2] * 40, max_tokens=2)
    lookups: list[int] = []
    find = scheduler.block_manager._find_cached_blocks
    monkeypatch.setattr(
        scheduler.block_manager,
        "_find_cached_blocks",
        lambda seq: lookups.append(seq.seq_id) or find(seq),
    )
    while short.finish_reason is None:
        complete(scheduler, schedule(scheduler))
    assert lookups == [0, 1], "once each, however many steps the short one took"
    assert schedule(scheduler).sampled_seq_ids == [long.seq_id]
