"""Decides who runs in the next step, with how many tokens.

`schedule()` advances counters and takes blocks without knowing the ids that the step in flight will
sample; `postprocess()` fills those in, publishes full blocks and releases what has ended. Only
preemption needs all ids, and waits until no step is in flight. Nothing here knows of tensors.
"""

from collections import deque
from collections.abc import Collection
from operator import attrgetter

from nanovllm.engine.batch import (
    BlockGrowth,
    DecodePart,
    PrefillChunk,
    PrefillPart,
    RowHistory,
    RowInit,
    ScheduledBatch,
    StepLogprobs,
)
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.shared_prefix import PrefixGroup, find_prefix_groups, pays

NO_LOGPROBS = StepLogprobs()
MAX_STEPS_HELD = 8  # that a prompt waits for company


class Scheduler:
    """Each step decodes all running sequences; prompts, first come first served, fill the rest of
    its budget of tokens. So neither do prompts stall decoding, nor do they need steps of their own.

    While requests queue for rows, they are admitted `max_num_seqs` / 32 at a time, as the first
    prompt of a step costs more than the others; none is held for more than `MAX_STEPS_HELD` steps.

    Sequences are resident (hold a row and blocks) from their first scheduled chunk. `running` are
    those whose whole prompt has been scheduled, in order of admission; a prompt that is only partly
    scheduled stays, resident, at the head of `waiting`.

    reserved_tokens: room that each running sequence keeps when another one is admitted.
    finds_prefix_groups: whether the runner can read once what sequences share.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        stop_token_ids: Collection[int],
        reserved_tokens: int = 32,
        finds_prefix_groups: bool = False,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.reserved_tokens = reserved_tokens
        self.finds_prefix_groups = finds_prefix_groups
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._unfinished: dict[int, Sequence] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._num_steps_held = 0  # for which free rows have waited to become more
        self._offers: deque[list[int]] = deque()  # for each step in flight, the blocks it offered
        self._offered: list[int] = []  # by the step that is being scheduled
        # The head that found too few free blocks, and how many there were.
        self._blocked: tuple[int, int] | None = None
        # The sequences that groups were looked for last, in the order of their batch, and those.
        self._grouped: tuple[list[int], list[PrefixGroup]] = ([], [])

    def add(self, seq: Sequence) -> None:
        self._unfinished[seq.seq_id] = seq
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self._unfinished

    @property
    def num_residents(self) -> int:
        return self.max_num_seqs - len(self._free_rows)

    def schedule(self) -> ScheduledBatch | None:
        """Returns the next step, None if nothing can run before the step in flight completes."""
        room = self._make_room()
        if room is None:
            return None
        decode = self._schedule_decode(*room)
        num_decoded = len(decode.rows) if decode else 0
        prefill = self._schedule_prefill(self.max_num_batched_tokens - num_decoded)
        return self._batch(decode, prefill) if decode or prefill else None

    def postprocess(
        self, batch: ScheduledBatch, token_ids: list[int], logprobs: StepLogprobs = NO_LOGPROBS
    ) -> list[Sequence]:
        """Completes the oldest step in flight and returns the sequences that ended with it.

        token_ids: one for each of `batch.sampled_seq_ids`; that of a sequence which had ended
            before is dropped, as are its `logprobs`.
        """
        self._offers.popleft()
        self._note_prompt_logprobs(batch, logprobs)
        finished: list[Sequence] = []
        for seq_id, token_id in zip(batch.sampled_seq_ids, token_ids, strict=True):
            seq = self._unfinished.get(seq_id)
            if seq is None:
                continue
            # The step has computed the last known token; when that filled a block, publish it.
            if len(seq.token_ids) % self.block_manager.block_size == 0:
                self.block_manager.publish(seq, len(seq.token_ids))
            seq.token_ids.append(token_id)
            if seq.logprobs is not None:
                seq.logprobs.append(logprobs.sampled[seq_id])
            if self._finish_if_ended(seq, token_id):
                self._release(seq)
                finished.append(seq)
                del self.running[seq_id], self._unfinished[seq_id]
        return finished

    def abort(self, seq_ids: Collection[int]) -> None:
        """Drops requests, wherever they are; what steps in flight sample for them is dropped."""
        aborted = [self._unfinished.pop(i) for i in seq_ids if i in self._unfinished]
        for seq in aborted:
            self._release(seq)
            self.running.pop(seq.seq_id, None)
        if aborted:
            self.waiting = deque(seq for seq in self.waiting if seq.seq_id in self._unfinished)

    def abort_all(self) -> None:
        self.abort(list(self._unfinished))

    def forget_steps_in_flight(self) -> None:
        """Counts no step as in flight any more: the ids of those that are will not be read."""
        self._offers.clear()

    def recover(self) -> None:
        """Forgets the steps in flight and starts all residents afresh, after a step has failed.

        Whatever those steps had offered to the prefix cache is taken back.
        """
        for offered in (*self._offers, self._offered):
            self.block_manager.withdraw(offered)
        self._offered = []
        self.forget_steps_in_flight()
        if self.waiting:  # only the head can be resident
            self._release(self.waiting[0])
        for seq in self.running.values():
            if seq.finish_reason is not None:  # raised before it was removed: let it end again
                seq.finish_reason = None
                seq.token_ids.pop()
                if seq.logprobs is not None:
                    seq.logprobs.pop()
                seq.num_tokens = len(seq.token_ids)
        while self.running:
            self._preempt_last()

    def _schedule_prefill(self, budget: int) -> PrefillPart | None:
        """Schedules `budget` tokens of prompts while rows and blocks last; the last may get a
        chunk."""
        if self._holds_admissions():
            return None
        seqs: list[Sequence] = []
        chunks: list[PrefillChunk] = []
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            init = None
            if seq.row is None:
                if not self._free_rows or not self._allocate(seq):
                    break
                seq.row = self._free_rows.pop()
                table, history = list(seq.block_table), self._history(seq)
                init = RowInit(seq.sampling_params, seq.seed, table, history)
            start = seq.num_computed_tokens
            end = min(start + budget, seq.num_tokens)
            is_last = end == seq.num_tokens
            is_cached = start < seq.num_published_blocks * self.block_manager.block_size
            chunks.append(PrefillChunk(start, seq.token_ids[start:end], is_last, is_cached, init))
            seqs.append(seq)
            budget -= end - start
            seq.num_computed_tokens = end
            # At once: every layer stores the K/V of a whole step before it attends, so that prompts
            # of the same step can share it. Noted first, should publishing be interrupted.
            self._offered += self.block_manager.unpublished_blocks(seq, end)
            self.block_manager.publish(seq, end)
            if is_last:
                seq.num_tokens += 1
                self.waiting.popleft()
                self.running[seq.seq_id] = seq
        return PrefillPart(*_named(seqs), chunks, _longest(seqs)) if seqs else None

    def _history(self, seq: Sequence) -> RowHistory | None:
        """Returns what the row of a sequence needs to know, None if it is sampled plainly."""
        params = seq.sampling_params
        if params.is_plain:
            return None
        needs_tokens = params.has_penalties or params.prompt_logprobs is not None
        return RowHistory(
            seq.num_prompt_tokens,
            seq.token_ids[:] if needs_tokens else seq.token_ids[:0],
            params.ending_ids(self.stop_token_ids) if params.min_tokens else frozenset(),
        )

    def _note_prompt_logprobs(self, batch: ScheduledBatch, logprobs: StepLogprobs) -> None:
        """Keeps what a step reports of prompts; what is computed again is replaced."""
        if not batch.prefill or not logprobs.prompts:
            return
        for seq_id, chunk in zip(batch.prefill.seq_ids, batch.prefill.chunks, strict=True):
            seq = self._unfinished.get(seq_id)
            if seq is not None and seq_id in logprobs.prompts:
                assert seq.prompt_logprobs is not None
                noted = logprobs.prompts[seq_id]
                seq.prompt_logprobs[chunk.start + 1 : chunk.start + 1 + len(noted)] = noted

    def _holds_admissions(self) -> bool:
        """Returns whether the first prompt waits for more free rows; it counts the steps."""
        num_wanted = min(self.max_num_seqs // 32, len(self.waiting))
        is_held = (
            0 < len(self._free_rows) < num_wanted
            and self.waiting[0].row is None
            and self._num_steps_held < MAX_STEPS_HELD
        )
        self._num_steps_held = self._num_steps_held + 1 if is_held else 0
        return is_held

    def _allocate(self, seq: Sequence) -> bool:
        """Takes the blocks of the first waiting sequence, unless too few would stay for others.

        While others run, each keeps room for its next `reserved_tokens` tokens: else they would
        preempt the newcomer soon. A sequence that did not fit is not looked up again until more
        blocks are free.
        """
        num_free = self.block_manager.num_free_blocks
        blocked, num_free_then = self._blocked or (None, 0)
        if self.running and blocked == seq.seq_id and num_free <= num_free_then:
            return False
        reserve = self.block_manager.blocks_for(self.reserved_tokens * len(self.running))
        has_blocks = self.block_manager.allocate(seq, reserve)
        self._blocked = None if has_blocks else (seq.seq_id, num_free)
        return has_blocks

    def _growing(self) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that decode next, which are those running whose final token is not
        scheduled yet, and which of them need a new block for it."""
        seqs = [seq for seq in self.running.values() if seq.num_tokens < seq.max_num_tokens]
        return seqs, [seq for seq in seqs if self.block_manager.needs_block(seq)]

    def _make_room(self) -> tuple[list[Sequence], list[Sequence]] | None:
        """Preempts the most recently admitted sequences until the others have their next blocks.

        The pool holds at least one request of `max_model_len`, so the first admitted always fits.
        It returns what `_growing` then does, or None if it must wait for a step in flight, whose
        ids a preempted sequence recomputes.
        """
        while True:
            seqs, growing = self._growing()
            if len(growing) <= self.block_manager.num_free_blocks:
                return seqs, growing
            head = self.waiting[0] if self.waiting else None
            if head is not None and head.row is not None:  # partly scheduled: no id to wait for
                self._release(head)
            elif self._offers:  # a step is in flight
                return None
            else:
                self._preempt_last()
            self.num_preemptions += 1

    def _schedule_decode(self, seqs: list[Sequence], growing: list[Sequence]) -> DecodePart | None:
        """Schedules one token for each of `seqs`; blocks for those of them that grow are free."""
        growth = []
        for seq in growing:
            block_id = self.block_manager.append_block(seq)
            growth.append(BlockGrowth(_row(seq), len(seq.block_table) - 1, block_id))
        for seq in seqs:
            seq.num_computed_tokens += 1
            seq.num_tokens += 1
        # Longest first: else a long context that starts late leaves most of a GPU idle at the end.
        seqs.sort(key=_num_tokens, reverse=True)
        if not seqs:
            return None
        return DecodePart(*_named(seqs), growth, _longest(seqs), self._prefix_groups(seqs))

    def _prefix_groups(self, seqs: list[Sequence]) -> list[PrefixGroup]:
        """Returns the groups of a decode batch that shares prefixes, if it pays to use them.

        They stay the same as long as the batch has the same sequences.
        """
        manager = self.block_manager
        if not self.finds_prefix_groups or not manager.num_shared_reads:
            return []
        num_keys = sum(seq.num_computed_tokens for seq in seqs)
        if not pays(manager.num_shared_reads, manager.block_size, num_keys):
            return []
        seq_ids = [seq.seq_id for seq in seqs]
        if seq_ids != self._grouped[0]:
            groups = find_prefix_groups(
                [seq.block_table for seq in seqs],
                [seq.num_computed_tokens for seq in seqs],
                manager.block_size,
            )
            self._grouped = seq_ids, groups
        groups = self._grouped[1]
        num_saved = sum(group.num_saved for group in groups)
        return groups if pays(num_saved, manager.block_size, num_keys) else []

    def _preempt_last(self) -> None:
        _, seq = self.running.popitem()
        self._release(seq)
        self.waiting.appendleft(seq)

    def _batch(self, decode: DecodePart | None, prefill: PrefillPart | None) -> ScheduledBatch:
        """Counts the step as in flight, with the blocks that it has offered."""
        self._offers.append(self._offered)
        self._offered = []
        return ScheduledBatch(decode, prefill)

    def _release(self, seq: Sequence) -> None:
        """Takes row and blocks from `seq`; scheduled again, it computes all its tokens afresh."""
        if seq.row is None:
            return
        self.block_manager.free(seq)
        self._grouped = ([], [])  # admitted again, it may get other blocks
        self._free_rows.append(seq.row)
        seq.row = None
        seq.num_computed_tokens = 0
        seq.num_tokens = len(seq.token_ids)

    def _finish_if_ended(self, seq: Sequence, token_id: int) -> bool:
        """Sets the finish reason if this token ends `seq`; returns whether it does."""
        if token_id in self.stop_token_ids and not seq.sampling_params.ignore_eos:
            seq.finish_reason = "stop"
        elif len(seq.token_ids) >= seq.max_num_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None


_num_tokens = attrgetter("num_tokens")


def _row(seq: Sequence) -> int:
    assert seq.row is not None, "only residents are scheduled"
    return seq.row


def _named(seqs: list[Sequence]) -> tuple[list[int], list[int]]:
    """Returns ids and rows of resident sequences."""
    return [seq.seq_id for seq in seqs], [_row(seq) for seq in seqs]


def _longest(seqs: list[Sequence]) -> int:
    return max(seq.num_computed_tokens for seq in seqs)
