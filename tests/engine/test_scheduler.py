"""Tests the scheduler's rules one by one, with made-up sampled ids."""

from array import array

import pytest

from nanovllm.engine.admission import MAX_STEPS_HELD
from nanovllm.engine.batch import BlockCopy, BlockGrowth, ScheduledBatch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 4
STOP_ID = 0


def make_scheduler(
    *,
    num_blocks: int = 100,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 1000,
    reserved_tokens: int = 0,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        stop_token_ids={STOP_ID},
        reserved_tokens=reserved_tokens,
    )


def add(scheduler: Scheduler, seq_id: int, num_tokens: int, max_tokens: int = 64) -> Sequence:
    """Queues a prompt that shares no prefix with any other prompt."""
    prompt = [1000 * (seq_id + 1) + i for i in range(num_tokens)]
    return add_prompt(scheduler, seq_id, prompt, max_tokens)


def add_prompt(
    scheduler: Scheduler, seq_id: int, prompt: list[int], max_tokens: int = 64
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    seq = Sequence(seq_id, array("q", prompt), params, max_model_len=1000, seed=seq_id)
    scheduler.add(seq)
    return seq


def schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def complete(scheduler: Scheduler, batch: ScheduledBatch, token_id: int = 7) -> list[Sequence]:
    return scheduler.postprocess(batch, [token_id] * len(batch.sampled_seq_ids))


def step(scheduler: Scheduler) -> ScheduledBatch:
    batch = schedule(scheduler)
    complete(scheduler, batch)
    return batch


def spans(batch: ScheduledBatch) -> list[tuple[int, int, int]]:
    """Returns (sequence id, start, end) of each chunk."""
    if batch.prefill is None:
        return []
    pairs = zip(batch.prefill.seq_ids, batch.prefill.chunks, strict=True)
    return [(i, chunk.start, chunk.start + len(chunk.token_ids)) for i, chunk in pairs]


def decoded(batch: ScheduledBatch) -> list[int]:
    """Returns the ids of the sequences that decode."""
    return batch.decode.seq_ids if batch.decode else []


def test_prompts_join_the_steps_of_those_that_run_in_order_of_arrival() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 3)
    add(scheduler, 1, 5)
    batch = step(scheduler)
    assert (decoded(batch), spans(batch)) == ([], [(0, 0, 3), (1, 0, 5)])
    add(scheduler, 2, 2)
    batch = step(scheduler)
    assert (decoded(batch), spans(batch)) == ([1, 0], [(2, 0, 2)])
    assert batch.sampled_seq_ids == [1, 0, 2]
    assert (batch.num_decoded, batch.num_prefilled) == (2, 2)
    batch = step(scheduler)
    assert (sorted(decoded(batch)), spans(batch)) == ([0, 1, 2], [])


def test_a_request_per_step_does_not_keep_the_others_from_decoding() -> None:
    scheduler = make_scheduler()
    for seq_id in range(8):
        add(scheduler, seq_id, 3)
        batch = step(scheduler)
        assert (batch.num_decoded, spans(batch)) == (seq_id, [(seq_id, 0, 3)])


def test_a_long_prompt_takes_what_decoding_leaves_of_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    for seq_id in range(2):
        add(scheduler, seq_id, 2)
    step(scheduler)
    add(scheduler, 2, 7)
    batches = [step(scheduler) for _ in range(3)]
    assert [spans(batch) for batch in batches] == [[(2, 0, 3)], [(2, 3, 6)], [(2, 6, 7)]]
    assert all(sorted(decoded(batch)) == [0, 1] for batch in batches)
    assert [batch.sampled_seq_ids[2:] for batch in batches] == [[], [], [2]]


def test_a_prompt_that_is_partly_scheduled_gives_way_to_those_that_run() -> None:
    """No id is due for it, so this need not wait for the step in flight."""
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=5)
    add(scheduler, 0, 4)
    step(scheduler)
    long = add(scheduler, 1, 12)
    first = schedule(scheduler)
    assert (decoded(first), spans(first)) == ([0], [(1, 0, 4)])
    seqs = list(scheduler.running.values())
    seqs[0].num_tokens += 3  # as if it had decoded: now it needs a third block
    second = schedule(scheduler)
    assert (decoded(second), scheduler.num_preemptions) == ([0], 1)
    assert scheduler.waiting[0] is long
    scheduler.block_manager.check_integrity([*seqs, long])


def test_a_decode_step_has_the_longest_context_first() -> None:
    """The longest contexts come first so that the programs that a GPU starts last are short."""
    scheduler = make_scheduler()
    for seq_id, num_tokens in enumerate((3, 9, 5, 9)):
        add(scheduler, seq_id, num_tokens)
    step(scheduler)
    batch = step(scheduler)
    assert batch.decode is not None
    assert batch.decode.seq_ids == [1, 3, 2, 0]
    row_of = dict(zip(batch.decode.seq_ids, batch.decode.rows, strict=True))
    assert row_of == {seq_id: seq.row for seq_id, seq in scheduler.running.items()}


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, 0, 9)
    add(scheduler, 1, 8)
    add(scheduler, 2, 1)
    assert spans(step(scheduler)) == [(0, 0, 9)]
    batch = step(scheduler)
    assert (decoded(batch), spans(batch)) == ([0], [])
    assert [seq.seq_id for seq in scheduler.waiting] == [1, 2]


def test_a_prompt_beyond_the_budget_is_chunked() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, 0, 6)
    long = add(scheduler, 1, 18)
    add(scheduler, 2, 3)
    batch = step(scheduler)
    assert spans(batch) == [(0, 0, 6), (1, 0, 4)]
    assert batch.sampled_seq_ids == [0]
    assert [seq.seq_id for seq in scheduler.waiting] == [1, 2]
    assert scheduler.num_residents == 2
    batch = step(scheduler)
    assert (decoded(batch), spans(batch)) == ([0], [(1, 4, 13)])
    assert batch.sampled_seq_ids == [0]
    assert batch.prefill is not None
    assert batch.prefill.chunks[0].init is None, "its row has been started"
    batch = step(scheduler)
    assert spans(batch) == [(1, 13, 18), (2, 0, 3)]
    assert batch.sampled_seq_ids == [0, 1, 2]
    assert long.seq_id in scheduler.running
    assert decoded(step(scheduler)) == [1, 0, 2], "longest first"


def test_a_chunk_may_be_followed_before_its_step_completes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, 0, 8)
    first, second = schedule(scheduler), schedule(scheduler)
    assert spans(first) + spans(second) == [(0, 0, 4), (0, 4, 8)]
    decode = schedule(scheduler)
    assert decoded(decode) == [0], "its input is the id that the step before samples"
    for batch in (first, second, decode):
        complete(scheduler, batch)


def test_the_most_recently_admitted_is_preempted_and_resumes() -> None:
    scheduler = make_scheduler(num_blocks=5)
    seqs = [add(scheduler, seq_id, 4) for seq_id in range(3)]
    assert step(scheduler).sampled_seq_ids == [0, 1, 2]
    later = add(scheduler, 3, 24)
    batch = step(scheduler)  # each sequence needs a second block, but two are left
    assert batch.decode is not None
    assert decoded(batch) == [0, 1]
    assert [growth.index for growth in batch.decode.growth] == [1, 1]
    assert scheduler.num_preemptions == 1
    assert list(scheduler.waiting) == [seqs[2], later]
    assert (seqs[2].row, seqs[2].block_table) == (None, [])
    scheduler.abort([0])
    assert spans(step(scheduler)) == [(2, 4, 5)], "its first block is still cached"
    assert seqs[2].completion_token_ids == [7, 7]


def test_nothing_is_preempted_while_a_step_is_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=3)
    seqs = [add(scheduler, seq_id, 4) for seq_id in range(2)]
    prefill = schedule(scheduler)
    tables = [list(seq.block_table) for seq in seqs]
    assert scheduler.schedule() is None
    assert (scheduler.num_preemptions, scheduler.num_residents) == (0, 2)
    assert [seq.block_table for seq in seqs] == tables
    assert [seq.num_tokens for seq in seqs] == [5, 5]
    complete(scheduler, prefill)
    batch = schedule(scheduler)
    assert (decoded(batch), scheduler.num_preemptions) == ([0], 1)
    assert seqs[1].token_ids[4:].tolist() == [7], "what it must recompute is known"


def test_max_num_seqs_caps_residents() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    seqs = [add(scheduler, seq_id, 5, max_tokens=20) for seq_id in range(16)]
    for wave in range(4):
        ids = list(range(4 * wave, 4 * wave + 4))
        for index in range(20):
            batch = step(scheduler)
            assert batch.sampled_seq_ids == ids
            assert decoded(batch) == (ids if index else [])
            assert sum(seq.row is not None for seq in seqs) in (0, 4)
    assert scheduler.is_finished()
    assert {len(seq.completion_token_ids) for seq in seqs} == {20}


def test_requests_that_queue_for_rows_are_admitted_together() -> None:
    scheduler = make_scheduler(max_num_seqs=96, num_blocks=1000)
    lasting = [40] * 91 + [2, 3, 4, 5, 20]
    for seq_id, max_tokens in enumerate(lasting):
        add(scheduler, seq_id, 2, max_tokens)
    for seq_id in range(200, 206):
        add(scheduler, seq_id, 2, 40)
    admitted = [[seq_id for seq_id, _, _ in spans(step(scheduler))] for _ in range(18)]
    # Rows become free after steps 2, 3, 4 and 5: the first three together, the fourth alone.
    assert admitted[0] == list(range(96))
    assert admitted[4] == [200, 201, 202]
    number = next(i for i in range(5, 18) if admitted[i])
    assert (number, admitted[number]) == (5 + MAX_STEPS_HELD, [203])


def test_decode_grows_a_table_when_a_token_needs_it() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 0, BLOCK_SIZE - 1)
    step(scheduler)
    first, second = step(scheduler).decode, step(scheduler).decode
    assert first is not None
    assert second is not None
    assert first.growth == []
    assert second.growth == [BlockGrowth(second.rows[0], 1, seq.block_table[1])]
    assert second.max_context_len == BLOCK_SIZE + 1


def test_blocks_filled_by_decode_are_offered_to_later_prompts() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 0, BLOCK_SIZE, max_tokens=BLOCK_SIZE + 1)
    while not scheduler.is_finished():
        step(scheduler)
    add_prompt(scheduler, 1, [*seq.token_ids, 1, 2])
    assert spans(step(scheduler)) == [(1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 3)]


def test_a_known_end_is_not_overrun() -> None:
    scheduler = make_scheduler()
    seq = add(scheduler, 0, 4, max_tokens=2)
    prefill, decode = schedule(scheduler), schedule(scheduler)
    assert scheduler.schedule() is None
    assert complete(scheduler, prefill) == []
    assert scheduler.schedule() is None
    assert complete(scheduler, decode) == [seq]
    assert seq.finish_reason == "length"
    assert scheduler.is_finished()


def test_ids_for_sequences_that_ended_meanwhile_are_dropped() -> None:
    scheduler = make_scheduler()
    stopped, aborted, other = (add(scheduler, seq_id, 4) for seq_id in range(3))
    prefill, decode = schedule(scheduler), schedule(scheduler)
    assert scheduler.postprocess(prefill, [STOP_ID, 7, 7]) == [stopped]
    scheduler.abort([aborted.seq_id, aborted.seq_id, 99])
    assert scheduler.num_residents == 1
    assert scheduler.postprocess(decode, [8, 8, 8]) == []
    completions = [seq.completion_token_ids for seq in (stopped, aborted, other)]
    assert completions == [[STOP_ID], [7], [7, 8]]
    assert stopped.finish_reason == "stop"
    assert aborted.finish_reason is None
    scheduler.block_manager.check_integrity([other])


def test_recover_starts_every_resident_afresh_in_order() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    seqs = [add(scheduler, 0, 4), add(scheduler, 1, 4), add(scheduler, 2, 9), add(scheduler, 3, 1)]
    complete(scheduler, schedule(scheduler))
    schedule(scheduler)  # decodes two, and computes the last chunk of sequence 2, and sequence 3
    scheduler.recover()
    assert list(scheduler.waiting) == seqs
    assert scheduler.num_residents == 0
    assert scheduler.block_manager.num_free_blocks == 100
    batch = step(scheduler)
    assert spans(batch) == [(0, 4, 5), (1, 4, 5), (2, 0, 8)], "only completed steps are cached"
    assert [seq.completion_token_ids for seq in seqs] == [[7, 7], [7, 7], [], []]


def add_samples(scheduler: Scheduler, seq_id: int, num_tokens: int, n: int) -> Sequence:
    params = SamplingParams(n=n, max_tokens=64)
    prompt = array("q", [1000 * (seq_id + 1) + i for i in range(num_tokens)])
    seq = Sequence(seq_id, prompt, params, max_model_len=1000, seed=seq_id)
    scheduler.add(seq)
    return seq


def test_samples_fork_when_the_last_chunk_of_their_prompt_is_scheduled() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    first = add_samples(scheduler, 0, 10, n=3)
    batch = step(scheduler)
    assert batch.prefill is not None
    assert (spans(batch), batch.prefill.forks) == ([(0, 0, 6)], [])
    batch = schedule(scheduler)
    assert spans(batch) == [(0, 6, 10)]
    assert batch.sampled_seq_ids == [0, 1, 2]
    assert batch.prefill is not None
    assert batch.prefill.sampled_rows == [seq.row for seq in (first, *first.others)]
    for fork, seq in zip(batch.prefill.forks, first.others, strict=True):
        assert (fork.chunk, fork.seq_id, fork.row) == (0, seq.seq_id, seq.row)
        assert fork.init.block_table == seq.block_table
        assert seq.block_table[:2] == first.block_table[:2]
        assert fork.copied == BlockCopy(first.block_table[2], seq.block_table[2], num_tokens=2)
    complete(scheduler, batch)
    batch = schedule(scheduler)
    assert sorted(decoded(batch)) == [0, 1, 2]
    assert first.others[0].token_ids[-1] == 7


def test_a_prompt_that_fills_its_blocks_is_forked_without_a_copy() -> None:
    scheduler = make_scheduler()
    first = add_samples(scheduler, 0, 8, n=2)
    batch = schedule(scheduler)
    assert batch.prefill is not None
    (fork,) = batch.prefill.forks
    assert fork.copied is None
    assert fork.init.block_table == first.block_table


def test_samples_without_room_wait_ahead_of_others() -> None:
    scheduler = make_scheduler(max_num_seqs=3, num_blocks=4)
    add_samples(scheduler, 0, 6, n=4)  # takes 2 blocks, and each fork one more
    add(scheduler, 10, 3)
    batch = schedule(scheduler)
    assert batch.sampled_seq_ids == [0, 1, 2]
    assert [seq.seq_id for seq in scheduler.waiting] == [3, 10]
    scheduler.block_manager.check_integrity(scheduler.running.values())


def test_a_request_of_samples_waits_a_while_for_rows_for_all() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    running = [add(scheduler, i, 3) for i in range(2)]
    step(scheduler)
    add_samples(scheduler, 10, 5, n=3)
    for _ in range(MAX_STEPS_HELD):
        assert spans(step(scheduler)) == []
    assert step(scheduler).sampled_seq_ids == [0, 1, 10, 11], "no longer"
    scheduler.abort([10, 11, 12])
    add_samples(scheduler, 20, 5, n=3)
    assert spans(step(scheduler)) == []
    scheduler.abort([running[0].seq_id])
    assert step(scheduler).sampled_seq_ids == [1, 20, 21, 22]


def test_sequences_that_end_in_an_interrupted_completion_are_returned_by_recover() -> None:
    scheduler = make_scheduler()
    ended, other = add(scheduler, 0, 3, max_tokens=1), add(scheduler, 1, 3)
    batch = schedule(scheduler)

    def interrupted(seq: Sequence) -> None:
        assert seq.finish_reason == "length"
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            complete(scheduler, batch)
    assert scheduler.recover() == [ended]
    assert ended.completion_token_ids == [7]
    assert [seq.seq_id for seq in scheduler.waiting] == [other.seq_id]
