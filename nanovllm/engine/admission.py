"""Decides when a waiting sequence becomes resident: it needs a row and blocks."""

from collections import deque

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

MAX_STEPS_HELD = 8  # that a prompt waits for company


class Admission:
    """Deals out rows and blocks.

    While requests queue for rows, they are admitted `max_num_seqs` / 32 at a time, as the first
    prompt of a step costs more than the others, and a request of several samples waits for rows for
    all of them; none is held for more than `MAX_STEPS_HELD` steps.
    """

    def __init__(self, block_manager: BlockManager, max_num_seqs: int) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._num_steps_held = 0  # for which free rows have waited to become more
        # The head that found too few free blocks, and how many there were.
        self._blocked: tuple[int, int] | None = None

    @property
    def num_residents(self) -> int:
        return self.max_num_seqs - len(self._free_rows)

    def holds(self, waiting: deque[Sequence]) -> bool:
        """Returns whether the first prompt waits for more free rows; it counts the steps."""
        num_wanted = min(self.max_num_seqs // 32, len(waiting))
        if waiting and waiting[0].lacks_samples:
            num_wanted = max(num_wanted, min(waiting[0].sampling_params.n, self.max_num_seqs))
        is_held = (
            0 < len(self._free_rows) < num_wanted
            and waiting[0].row is None
            and self._num_steps_held < MAX_STEPS_HELD
        )
        self._num_steps_held = self._num_steps_held + 1 if is_held else 0
        return is_held

    def admit(self, seq: Sequence, reserve: int, *, others_run: bool) -> bool:
        """Gives the first waiting sequence a row and blocks, unless fewer than `reserve` blocks
        would stay for others.

        While others run, a sequence that did not fit is not looked up again until more blocks are
        free.
        """
        if not self._free_rows:
            return False
        num_free = self.block_manager.num_free_blocks
        blocked, num_free_then = self._blocked or (None, 0)
        if others_run and blocked == seq.seq_id and num_free <= num_free_then:
            return False
        has_blocks = self.block_manager.allocate(seq, reserve)
        self._blocked = None if has_blocks else (seq.seq_id, num_free)
        if has_blocks:
            seq.row = self._free_rows.pop()
        return has_blocks

    def admit_sample(self, seq: Sequence, first: Sequence, reserve: int) -> bool:
        """Gives another sample of a prompt a row and blocks, most of which it shares with the first
        sample, unless fewer than `reserve` blocks would stay for others."""
        if not self._free_rows:
            return False
        if not self.block_manager.fork(first, seq, reserve):
            return False
        seq.row = self._free_rows.pop()
        return True

    def recover(self) -> None:
        """Has all rows free: no sequence is resident any more."""
        self._free_rows = list(reversed(range(self.max_num_seqs)))
        self._blocked = None

    def release(self, seq: Sequence) -> None:
        """Takes row and blocks from a sequence, which may have none."""
        if seq.row is None:
            return
        self.block_manager.free(seq)
        self._free_rows.append(seq.row)
        seq.restart()
