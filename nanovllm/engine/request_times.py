"""How long requests queue, wait for their first token, and take; only on demand."""

from time import perf_counter

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.sequence import Sequence


class _Moments:
    """When a sample was added, first scheduled, and got its first token, by `perf_counter`."""

    __slots__ = ("added", "first_token", "scheduled")

    def __init__(self, added: float) -> None:
        self.added = added
        self.scheduled: float | None = None
        self.first_token: float | None = None


class RequestTimer:
    """Follows samples from step to step, and leaves their times with them when they end.

    Only the prompts of a step are looked at: what decodes has its first token already.
    """

    def __init__(self) -> None:
        self._moments: dict[int, _Moments] = {}  # by sequence id

    def added(self, first: Sequence) -> None:
        """Starts the clocks of all samples of a request."""
        now = perf_counter()
        for seq_id in range(first.seq_id, first.seq_id + first.sampling_params.n):
            self._moments[seq_id] = _Moments(now)

    def scheduled(self, batch: ScheduledBatch) -> None:
        """Notes which samples queue no longer; one that is preempted later does not queue again."""
        if batch.prefill is None:
            return
        now = perf_counter()
        new = [
            seq_id
            for seq_id, chunk in zip(batch.prefill.seq_ids, batch.prefill.chunks, strict=True)
            if chunk.init is not None
        ]
        for seq_id in new + [fork.seq_id for fork in batch.prefill.forks]:
            moments = self._moments.get(seq_id)
            if moments is not None and moments.scheduled is None:
                moments.scheduled = now

    def completed(self, batch: ScheduledBatch, now: float) -> None:
        """Notes which samples have their first token."""
        if batch.prefill is None:
            return
        for seq_id in batch.sampled_seq_ids[batch.num_decoded :]:
            moments = self._moments.get(seq_id)
            if moments is not None and moments.first_token is None:
                moments.first_token = now

    def ended(self, seq: Sequence) -> None:
        """Stops the clocks of a sample, or of all if it stands for them, and sets its `times`."""
        now = perf_counter()
        moments = self._moments.pop(seq.seq_id, None)
        if moments is None:  # it has its times: the step that ended it was cut short after that
            return
        for seq_id in range(seq.seq_id + 1, seq.seq_id + seq.num_samples):
            self._moments.pop(seq_id, None)
        seq.times = {
            "queued": (moments.scheduled or now) - moments.added,
            "first_token": (moments.first_token or now) - moments.added,
            "total": now - moments.added,
        }
