"""Runs random schedules of scheduler and block manager against a simulated K/V store.

Sampled ids are delivered at once, or one step late, as when the host runs one step behind the
device. Some runs use a hash for the prefix cache that collides all the time.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from nanovllm.engine import block_manager
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.seeds import sample_seed
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from tests.helpers.simulated_runner import NUM_IDS, STOP_IDS, Oracle, Runner, Step

MAX_LEN = 40
MAX_SAMPLES = 10
LAST_TICK = 40  # at which requests arrive, are aborted, or steps fail
STEMS = [[1] * MAX_LEN, [(7 * i * i + i // 3) % NUM_IDS for i in range(MAX_LEN)]]


@dataclass(frozen=True)
class Request:
    """Describes a request whose prompt is the start of a stem, which other requests share, and a
    tail. It wants `n` samples. `arrives` and `aborted` are ticks."""

    stem: int
    stem_len: int
    tail: list[int]
    max_tokens: int
    ignore_eos: bool
    n: int
    seed: int
    arrives: int
    aborted: int | None


@dataclass(frozen=True)
class World:
    """Describes the engine's sizes and all requests of a run. If `late`, the ids of a step arrive
    after the next step is launched. `failures` are ticks."""

    late: bool
    has_weak_hash: bool
    enable_prefix_caching: bool
    block_size: int
    max_model_len: int
    num_spare_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    reserved_tokens: int
    failures: set[int]
    requests: list[Request]

    @property
    def max_steps(self) -> int:
        """Returns the largest number of steps that a run can need; a run with more is in a
        livelock.

        A step that samples nothing spends its whole budget on one prompt. An admission has fewer
        than `num_chunks` such steps, and then ends in a sample, unless an abort (one per request)
        or a failure cuts it short. Each sampled id is kept, dropped (one per request, by the step
        in flight when it ended) or lost (two steps per failure).
        """
        num_chunks = -(-self.max_model_len // self.max_num_batched_tokens)
        num_kept = sum(request.n * request.max_tokens for request in self.requests)
        num_samples = sum(request.n for request in self.requests)
        return num_chunks * (num_kept + 2 * num_samples + 3 * len(self.failures))


# Examples are slow on a busy machine, so slowness is no failure.
on_any_machine = partial(settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ticks = st.integers(0, LAST_TICK)
requests = st.builds(
    Request,
    stem=st.integers(0, 1),
    stem_len=st.integers(0, MAX_LEN // 2),
    tail=st.lists(st.integers(0, 2), max_size=3),
    max_tokens=st.integers(1, MAX_LEN),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 1, 1, 2, 3, 7]),
    seed=st.integers(0, 1),
    arrives=st.just(0) | ticks,
    aborted=st.none() | st.none() | st.none() | ticks,
)


def worlds(late: bool) -> st.SearchStrategy[World]:
    return st.builds(
        World,
        late=st.just(late),
        has_weak_hash=st.booleans(),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        block_size=st.integers(1, 3) | st.integers(1, 8),
        max_model_len=st.integers(2, MAX_LEN) | st.integers(MAX_LEN // 2, MAX_LEN),
        num_spare_blocks=st.integers(0, 4) | st.integers(0, 20),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, MAX_LEN),
        reserved_tokens=st.sampled_from([0, 0, 0, 0, 0, 1, 5, 32]),
        failures=st.just(set()) | st.sets(ticks, max_size=3),
        requests=st.lists(requests, min_size=1, max_size=6)
        | st.lists(requests, min_size=6, max_size=10),
    )


def weak_hash(previous: int, token_ids: list[int]) -> int:
    return (previous + sum(token_ids)) % 3


class Simulation:
    """Runs one world to its end. A tick is one iteration of the engine's loop."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stats: Counter[str] = Counter()
        num_blocks = -(-world.max_model_len // world.block_size) + world.num_spare_blocks
        self.manager = BlockManager(num_blocks, world.block_size, world.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            stop_token_ids=STOP_IDS,
            reserved_tokens=world.reserved_tokens,
        )
        self.firsts = [self._sequence(*numbered) for numbered in enumerate(world.requests)]
        self.oracles = {
            first.seq_id + i: Oracle(
                first.token_ids,
                first.max_num_tokens,
                first.sampling_params.ignore_eos,
                sample_seed(first.seed, i),
            )
            for first in self.firsts
            for i in range(first.sampling_params.n)
        }
        self.runner = Runner(world.block_size, self.oracles)
        self.in_flight: deque[Step] = deque()
        self.finished: set[int] = set()
        self.aborted: set[int] = set()

    def run(self) -> Counter[str]:
        """Checks every property in every tick, and counts how often the notable events happened."""
        chain_hash = weak_hash if self.world.has_weak_hash else block_manager.chain_hash
        with mock.patch.object(block_manager, "chain_hash", chain_hash):
            self._run()
        self.stats["preemptions"] = self.scheduler.num_preemptions
        return self.stats

    def _run(self) -> None:
        # A tick launches a step, completes one, or waits for a request, an abort or a failure.
        for tick in range(2 * self.world.max_steps + LAST_TICK + 1):
            self._add_and_abort(tick)
            self._tick(tick in self.world.failures)
            self._check()
            if len(self.finished | self.aborted) == len(self.oracles) and not self.in_flight:
                break
        else:
            raise AssertionError("livelock")
        assert self.scheduler.is_finished()
        assert self.scheduler.num_residents == len(self.scheduler.waiting) == 0
        assert self.manager.num_free_blocks == self.manager.num_blocks, "a block leaked"
        for seq_id in self.finished:
            seq, oracle = self.seqs()[seq_id], self.oracles[seq_id]
            assert seq.completion_token_ids == oracle.completion
            assert seq.finish_reason == oracle.finish_reason

    def seqs(self) -> dict[int, Sequence]:
        """Returns all samples that there are by now."""
        return {seq.seq_id: seq for first in self.firsts for seq in (first, *first.others)}

    def _sequence(self, number: int, request: Request) -> Sequence:
        max_model_len = self.world.max_model_len
        prompt = STEMS[request.stem][: request.stem_len] + request.tail or [1]
        params = SamplingParams(
            n=request.n, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos
        )
        return Sequence(
            MAX_SAMPLES * number,
            array("q", prompt[: max_model_len - 1]),
            params,
            max_model_len=max_model_len,
            seed=request.seed,
        )

    def _add_and_abort(self, tick: int) -> None:
        for first, request in zip(self.firsts, self.world.requests, strict=True):
            if tick == request.arrives:
                self.scheduler.add(first)
            if request.aborted is not None and tick == max(request.arrives, request.aborted):
                self.scheduler.abort(self.scheduler.unfinished_samples(first.seq_id))
                seq_ids = range(first.seq_id, first.seq_id + request.n)
                self.aborted |= set(seq_ids) - self.finished

    def _tick(self, fails: bool) -> None:
        batch = self._schedule()
        if batch is not None:
            self.in_flight.append(self.runner.launch(batch))
        if fails:
            self.runner.fail(self.in_flight)
            self.in_flight.clear()
            self.scheduler.recover()
        while len(self.in_flight) > (self.world.late and batch is not None):
            step = self.in_flight.popleft()
            ended = self.finished | self.aborted
            self.stats["dropped ids"] += len(ended.intersection(step.batch.sampled_seq_ids))
            for seq in self.scheduler.postprocess(step.batch, step.token_ids):
                assert seq.seq_id not in ended
                self.finished.add(seq.seq_id)

    def _schedule(self) -> ScheduledBatch | None:
        running = set(self.scheduler.running)
        batch = self.scheduler.schedule()
        # Only a prompt that is partly scheduled may be preempted while ids are due.
        assert running <= self.scheduler.running.keys() or not self.in_flight
        if batch is None:
            assert self.in_flight or self.scheduler.is_finished(), "nothing runs, nothing is due"
            self.stats["drained steps"] += not self.scheduler.is_finished()
            return None
        parts = [part for part in (batch.decode, batch.prefill) if part is not None]
        rows = [row for part in parts for row in part.rows]
        assert all(len(part.seq_ids) == len(part.rows) > 0 for part in parts)
        rows += [fork.row for fork in batch.prefill.forks] if batch.prefill else []
        assert len(rows) == len(set(rows)) > 0
        if batch.prefill:
            chunks = batch.prefill.chunks
            assert len(chunks) == len(batch.prefill.rows)
            assert all(chunk.token_ids for chunk in chunks)
            num_tokens = batch.num_prefilled + batch.num_decoded
            assert num_tokens <= self.world.max_num_batched_tokens
            self.stats["forks"] += len(batch.prefill.forks)
            self.stats["chunks"] += sum(not chunk.is_last for chunk in chunks)
            self.stats["cache hits"] += sum(chunk.start > 0 for chunk in chunks if chunk.init)
        self.stats["mixed steps"] += len(parts) == 2
        return batch

    def _check(self) -> None:
        seqs = self.seqs().values()
        self.manager.check_integrity(seqs)
        rows = [seq.row for seq in seqs if seq.row is not None]
        assert len(rows) == len(set(rows)) == self.scheduler.num_residents
        assert len(rows) <= self.world.max_num_seqs


@given(world=worlds(late=False))
@on_any_machine(max_examples=700)
def test_any_schedule_is_right_with_ids_at_once(world: World) -> None:
    Simulation(world).run()


@given(world=worlds(late=True))
@on_any_machine(max_examples=700)
def test_any_schedule_is_right_with_ids_one_step_late(world: World) -> None:
    Simulation(world).run()


@pytest.mark.parametrize("late", [False, True])
def test_the_schedules_are_hard(late: bool) -> None:
    stats: Counter[str] = Counter()

    @seed(0)
    @given(world=worlds(late))
    @on_any_machine(max_examples=300, database=None)
    def run(world: World) -> None:
        stats.update(Simulation(world).run())

    run()
    assert stats["preemptions"] > 50
    assert stats["cache hits"] > 50
    assert stats["chunks"] > 50
    assert stats["forks"] > 50
    assert stats["mixed steps"] > 50
    assert not late or (stats["dropped ids"] > 50 and stats["drained steps"] > 50)
