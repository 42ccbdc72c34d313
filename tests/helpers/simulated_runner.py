"""Simulates a model runner without a model, for tests of the scheduler.

The K/V of a position is a hash of the whole token prefix, so a wrong cached token, a stale row or a
lost update shows. The simulation reads nothing but batches, and keeps rows as `RowState` does.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nanovllm.engine.batch import DecodePart, PrefillPart, ScheduledBatch

NUM_IDS = 16
STOP_IDS = frozenset({0})
LOST = -1  # the value of a slot that a failed step wrote


def next_value(value: int, token_id: int) -> int:
    """Returns the K/V of `token_id` after the prefix whose last K/V is `value`."""
    return hash((value, token_id))  # the hash of ints is the same in every process


def sample(value: int, seed: int) -> int:
    return hash((value, seed, 1)) // 1024 % NUM_IDS


class Oracle:
    """Computes the result of a request on its own, without any cache.

    `values` has the K/V of every position that the request may compute; the last token is never
    computed.
    """

    def __init__(self, prompt: list[int], max_num_tokens: int, ignore_eos: bool, seed: int) -> None:
        token_ids = list(prompt)
        self.values: list[int] = []
        for position in range(max_num_tokens - 1):
            previous = self.values[-1] if self.values else 0
            self.values.append(next_value(previous, token_ids[position]))
            if position + 1 == len(token_ids):
                token_ids.append(sample(self.values[-1], seed))
        self.completion = token_ids[len(prompt) :]
        self.finish_reason = "length"
        stops = [i for i, token_id in enumerate(self.completion) if token_id in STOP_IDS]
        if stops and not ignore_eos:
            self.completion = self.completion[: stops[0] + 1]
            self.finish_reason = "stop"


# For each row its first position, its ids, and whether their K/V is stored.
Inputs = list[tuple[int, "array[int] | list[int]", bool]]


@dataclass(frozen=True)
class Step:
    batch: ScheduledBatch
    token_ids: list[int]
    slots: list[int]  # those that the step wrote


class Runner:
    """Computes batches in launch order. It uses `oracles`, by sequence id, only to check K/V."""

    def __init__(self, block_size: int, oracles: Mapping[int, Oracle]) -> None:
        self.block_size = block_size
        self.oracles = oracles
        self.store: dict[int, int] = {}  # slot -> value
        self._reset_rows()

    def launch(self, batch: ScheduledBatch) -> Step:
        """Checks the cached positions that each row relies on, then writes its new ones.

        A row may rely on what an earlier row of the same step writes, because a layer stores the
        K/V of the whole step before it attends.
        """
        sampled, slots = list[int](), list[int]()
        if batch.decode:
            slots += self._compute(batch.decode, self._decode_inputs(batch.decode))
            sampled += [self.last_tokens[row] for row in batch.decode.rows]
        if batch.prefill:
            slots += self._compute(batch.prefill, self._prefill_inputs(batch.prefill))
            is_cached = [chunk.is_cached for chunk in batch.prefill.chunks]
            assert len(slots) == batch.num_decoded + batch.num_prefilled - sum(is_cached)
            slots += self._fork(batch.prefill)
            sampled += [self.last_tokens[row] for row in batch.prefill.sampled_rows]
        assert len(slots) == len(set(slots)), "two tokens share a slot"
        return Step(batch, sampled, slots)

    def _compute(self, part: DecodePart | PrefillPart, inputs: Inputs) -> list[int]:
        """Computes the inputs of each row of a part; returns the slots that it writes."""
        slots: list[int] = []
        for seq_id, row, row_inputs in zip(part.seq_ids, part.rows, inputs, strict=True):
            start, token_ids, is_stored = row_inputs
            values = self.oracles[seq_id].values
            cached = [self.store.get(self._slot(row, position)) for position in range(start)]
            assert cached == values[:start], "a step relies on wrong K/V"
            self.context_lens[row] = start + len(token_ids)
            assert self.context_lens[row] <= len(values), "a known end is overrun"
            value = self.store[self._slot(row, start - 1)] if start else 0
            for position, token_id in enumerate(token_ids, start):
                value = next_value(value, token_id)
                slot = self._slot(row, position)
                if is_stored:
                    slots.append(slot)
                    self.store[slot] = value
                assert self.store[slot] == value
            self.last_tokens[row] = sample(value, self.seeds[row])
        assert part.max_context_len == max(self.context_lens[row] for row in part.rows)
        return slots

    def _fork(self, part: PrefillPart) -> list[int]:
        """Copies the blocks of further samples and draws their first tokens; returns the slots that
        it writes."""
        slots: list[int] = []
        for fork in part.forks:
            first, chunk = part.rows[fork.chunk], part.chunks[fork.chunk]
            assert chunk.is_last
            self.seeds[fork.row] = fork.init.seed
            for index, block_id in enumerate(fork.init.block_table):
                self.block_ids[fork.row, index] = block_id
            if fork.copied:
                for offset in range(fork.copied.num_tokens):
                    source = fork.copied.source * self.block_size + offset
                    slots.append(fork.copied.target * self.block_size + offset)
                    self.store[slots[-1]] = self.store[source]
            length = self.context_lens[fork.row] = self.context_lens[first]
            values = self.oracles[fork.seq_id].values
            stored = [self.store.get(self._slot(fork.row, i)) for i in range(length)]
            assert stored == values[:length], "a fork has wrong K/V"
            self.last_tokens[fork.row] = sample(values[length - 1], fork.init.seed)
        return slots

    def fail(self, steps: Iterable[Step]) -> None:
        """Simulates the failure of `steps`: all rows are reset, and the slots that the steps wrote
        are lost."""
        self.store.update((slot, LOST) for step in steps for slot in step.slots)
        self._reset_rows()

    def _reset_rows(self) -> None:
        self.block_ids: dict[tuple[int, int], int] = {}  # (row, index in its block table) -> block
        self.context_lens: dict[int, int] = {}
        self.last_tokens: dict[int, int] = {}
        self.seeds: dict[int, int] = {}

    def _prefill_inputs(self, part: PrefillPart) -> Inputs:
        for row, chunk in zip(part.rows, part.chunks, strict=True):
            if chunk.init is None:
                assert self.context_lens[row] == chunk.start
                continue
            self.seeds[row] = chunk.init.seed
            for index, block_id in enumerate(chunk.init.block_table):
                self.block_ids[row, index] = block_id
        return [(chunk.start, chunk.token_ids, not chunk.is_cached) for chunk in part.chunks]

    def _decode_inputs(self, part: DecodePart) -> Inputs:
        for growth in part.growth:
            self.block_ids[growth.row, growth.index] = growth.block_id
        return [(self.context_lens[row], [self.last_tokens[row]], True) for row in part.rows]

    def _slot(self, row: int, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        return self.block_ids[row, index] * self.block_size + offset
