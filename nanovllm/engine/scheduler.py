"""Decides who runs in the next step, with how many tokens.

`schedule()` advances counters and takes blocks without knowing the ids that the step in flight will
sample; `postprocess()` fills those in, publishes full blocks and releases what has ended. Only
preemption needs all ids, and waits until no step is in flight. Nothing here knows of tensors.
"""

from collections import deque
from collections.abc import Collection
from itertools import chain
from operator import attrgetter
from typing import cast

from nanovllm.engine.admission import Admission
from nanovllm.engine.batch import (
    BlockGrowth,
    DecodePart,
    Fork,
    PrefillChunk,
    PrefillPart,
    ScheduledBatch,
    StepLogprobs,
)
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.prefix_groups import PrefixGroups
from nanovllm.engine.row_init import row_init
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stop_rules import StopRules

NO_LOGPROBS = StepLogprobs()


class Scheduler:
    """Each step decodes all running sequences; prompts, first come first served, fill the rest of
    its budget of tokens. So neither do prompts stall decoding, nor do they need steps of their own.

    Sequences are resident (hold a row and blocks) from their first scheduled chunk. `running` are
    those whose whole prompt has been scheduled, in order of admission; a prompt that is only partly
    scheduled stays, resident, at the head of `waiting`.

    The first sample of a request stands for all of them until its whole prompt is scheduled. The
    step that ends the prompt samples a token for each; those that find no row or blocks then wait
    like requests of their own, ahead of all others.

    stop_token_ids: ids that end a request unless it ignores them.
    reserved_tokens: room that each running sequence keeps when another one is admitted.
    finds_prefix_groups: whether the runner can read once what sequences share.
    text_decoder: makes the text in which stop strings are found.
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
        text_decoder: TextDecoder | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.reserved_tokens = reserved_tokens
        self.finds_prefix_groups = finds_prefix_groups
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._unfinished: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []  # by the latest step, until somebody clears it
        self._admission = Admission(block_manager, max_num_seqs)
        self._stop_rules = StopRules(self.stop_token_ids, text_decoder)
        self._prefix_groups = PrefixGroups(block_manager)
        self._offers: deque[list[int]] = deque()  # for each step in flight, the blocks it offered
        self._offered: list[int] = []  # by the step that is being scheduled

    def add(self, seq: Sequence) -> None:
        self._unfinished[seq.seq_id] = seq
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self._unfinished

    @property
    def unfinished(self) -> Collection[Sequence]:
        """The sequences that have not ended, in no particular order."""
        return self._unfinished.values()

    @property
    def num_residents(self) -> int:
        return self._admission.num_residents

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

        token_ids: one for each of `batch.sampled_seq_ids`, -1 where none could be drawn, which ends
            the sequence as aborted. That of a sequence which had ended before is dropped, as are
            its `logprobs`.
        """
        self.ended = []
        self._offers.popleft()
        self._note_prompt_logprobs(batch, logprobs)
        block_size, stop_ids = self.block_manager.block_size, self.stop_token_ids
        for seq_id, token_id in zip(batch.sampled_seq_ids, token_ids, strict=True):
            seq = self._unfinished.get(seq_id)
            if seq is None:
                continue
            if token_id < 0:
                seq.finish_reason = "abort"
                self._end(seq)
                continue
            known = seq.token_ids
            # The step has computed the last known token; when that filled a block, publish it.
            if len(known) % block_size == 0:
                self.block_manager.publish(seq, len(known))
            known.append(token_id)
            if seq.logprobs is not None:
                seq.logprobs.append(logprobs.sampled[seq_id])
            may_stop = seq.has_own_stops or token_id in stop_ids
            if may_stop and self._stop_rules.stops(seq, token_id):
                self._end(seq)
            elif len(known) >= seq.max_num_tokens:
                seq.finish_reason = "length"
                self._end(seq)
        return self.ended

    def abort(self, seq_ids: Collection[int]) -> list[Sequence]:
        """Drops sequences, wherever they are; what steps in flight sample for them is dropped.

        It returns those of them that had not ended.
        """
        aborted = [self._unfinished.pop(i) for i in seq_ids if i in self._unfinished]
        for seq in aborted:
            self._release(seq)
            self.running.pop(seq.seq_id, None)
        if aborted:
            self.waiting = deque(seq for seq in self.waiting if seq.seq_id in self._unfinished)
        return aborted

    def unfinished_samples(self, request_id: int) -> list[int]:
        """Returns the ids of a request's samples that have not ended, in any thread."""
        unfinished = list(self._unfinished.values())  # at once: another thread may be stepping
        return [seq.seq_id for seq in unfinished if seq.request_id == request_id]

    def abort_all(self) -> list[Sequence]:
        return self.abort(list(self._unfinished))

    def forget_steps_in_flight(self) -> None:
        """Counts no step as in flight any more: the ids of those that are will not be read."""
        self._offers.clear()

    def recover(self) -> list[Sequence]:
        """Forgets the steps in flight and starts all sequences afresh, after a step has failed or
        any method here was cut short, wherever that was.

        Whatever those steps had offered to the prefix cache is taken back. It returns the sequences
        that had ended when the completion of a step was interrupted.
        """
        self.block_manager.recover(chain(*self._offers, self._offered))
        self._admission.recover()
        self._prefix_groups.forget()
        for first in list(self._unfinished.values()):
            others = [seq for seq in first.others if seq.finish_reason is None]
            self._unfinished.update((seq.seq_id, seq) for seq in others)
        self.running.clear()
        for seq in self._unfinished.values():
            seq.recover()
            self._stop_rules.recover(seq)
            if seq.finish_reason is not None and seq not in self.ended:
                self.ended.append(seq)
        for seq in self.ended:
            self._unfinished.pop(seq.seq_id, None)
        self.waiting = deque(self._unfinished[i] for i in sorted(self._unfinished))
        self._offered = []
        self.forget_steps_in_flight()
        return self.ended

    def _schedule_prefill(self, budget: int) -> PrefillPart | None:
        """Schedules `budget` tokens of prompts while rows and blocks last; the last may get a
        chunk."""
        if self._admission.holds(self.waiting):
            return None
        seqs: list[Sequence] = []
        chunks: list[PrefillChunk] = []
        forks: list[Fork] = []
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            init = None
            if seq.row is None:
                others_run = bool(self.running)
                if not self._admission.admit(seq, self._reserve(), others_run=others_run):
                    break
                init = row_init(seq, self.stop_token_ids)
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
                if seq.lacks_samples:
                    forks += self._fork(seq, len(seqs) - 1)
        return PrefillPart(*_named(seqs), chunks, _longest(seqs), forks) if seqs else None

    def _note_prompt_logprobs(self, batch: ScheduledBatch, logprobs: StepLogprobs) -> None:
        """Keeps what a step reports of prompts; what is computed again is replaced."""
        if not batch.prefill or not logprobs.prompts:
            return
        for seq_id, chunk in zip(batch.prefill.seq_ids, batch.prefill.chunks, strict=True):
            seq = self._unfinished.get(seq_id)
            noted = logprobs.prompts.get(seq_id)
            if seq is not None and seq.prompt_logprobs is not None and noted is not None:
                seq.prompt_logprobs[chunk.start + 1 : chunk.start + 1 + len(noted)] = noted

    def _fork(self, first: Sequence, chunk: int) -> list[Fork]:
        """Starts the other samples of a request, whose prompt ends in this step with `chunk`.

        Those for which there are no rows or blocks wait, in order.
        """
        forks: list[Fork] = []
        waiting: list[Sequence] = []
        for seq in first.make_others():
            self._unfinished[seq.seq_id] = seq
            if waiting or not self._admission.admit_sample(seq, first, self._reserve()):
                waiting.append(seq)
                continue
            seq.num_tokens += 1
            self.running[seq.seq_id] = seq
            copied = self.block_manager.copied_block(first, seq)
            forks.append(
                Fork(chunk, seq.seq_id, _row(seq), row_init(seq, self.stop_token_ids), copied)
            )
        self.waiting.extendleft(reversed(waiting))
        return forks

    def _reserve(self) -> int:
        """Returns how many blocks stay free when a sequence is admitted: room for the next
        `reserved_tokens` tokens of each that runs, which else would preempt the newcomer soon."""
        return self.block_manager.blocks_for(self.reserved_tokens * len(self.running))

    def _growing(self) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that decode next, which are those running whose final token is not
        scheduled yet, and which of them need a new block for it."""
        seqs = [seq for seq in self.running.values() if seq.num_tokens < seq.max_num_tokens]
        return seqs, self.block_manager.growing(seqs)

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
        groups = self._prefix_groups.of(seqs) if self.finds_prefix_groups else []
        return DecodePart(*_named(seqs), growth, _longest(seqs), groups)

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
        self._admission.release(seq)
        self._prefix_groups.forget()

    def _end(self, seq: Sequence) -> None:
        """Takes out a sequence that has its finish reason."""
        self._release(seq)
        self.ended.append(seq)
        del self.running[seq.seq_id], self._unfinished[seq.seq_id]


_num_tokens = attrgetter("num_tokens")


def _row(seq: Sequence) -> int:
    assert seq.row is not None, "only residents are scheduled"
    return seq.row


def _named(seqs: list[Sequence]) -> tuple[list[int], list[int]]:
    """Returns ids and rows of resident sequences."""
    rows = [seq.row for seq in seqs]
    assert None not in rows, "only residents are scheduled"
    return [seq.seq_id for seq in seqs], cast(list[int], rows)


def _longest(seqs: list[Sequence]) -> int:
    return max(seq.num_computed_tokens for seq in seqs)
