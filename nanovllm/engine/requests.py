"""The requests of one engine: their numbers, and where those go that have ended or are dropped.

What a method here does may be cut short and then done again: nothing is lost or counted twice.
"""

from array import array
from collections import deque
from collections.abc import Iterable

from nanovllm.config import Config
from nanovllm.engine.metrics import MetricsRecorder
from nanovllm.engine.numerical_error import not_finite
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.seeds import request_seed
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

Checked = list[tuple["array[int]", SamplingParams]]  # requests that can be served
Outbox = dict[int, Sequence]  # the ended sequences of one caller, by id


class Requests:
    """Queues requests with the scheduler, and delivers them.

    num_sequences: the samples of all requests so far; their ids are the numbers below it.
    unreported: the outbox of `LLMEngine.step`.
    """

    def __init__(self, scheduler: Scheduler, config: Config, metrics: MetricsRecorder) -> None:
        self.num_sequences = 0
        self.unreported: Outbox = {}
        self._scheduler = scheduler
        self._config = config
        self._metrics = metrics
        self._num_requests = 0
        self._to_drop: deque[int] = deque()

    @property
    def are_all_reported(self) -> bool:
        """Whether every request has ended, and those of `step` have been returned."""
        scheduler = self._scheduler
        # In this order: another thread may be moving one from each of these to the next.
        return scheduler.is_finished() and not scheduler.ended and not self.unreported

    def queue(self, requests: Checked, outbox: Outbox, firsts: list[Sequence]) -> None:
        """Queues requests and adds the first sample of each to `firsts`.

        outbox: takes the samples as they end.
        """
        for token_ids, params in requests:
            seq = Sequence(
                self.num_sequences,
                token_ids,
                params,
                max_model_len=self._config.max_model_len,
                seed=request_seed(params.seed, self._config.seed, self._num_requests),
                outbox=outbox,
            )
            self.num_sequences += params.n
            self._num_requests += 1
            firsts.append(seq)
            self._metrics.added(seq)
            self._scheduler.add(seq)

    def deliver_ended(self) -> None:
        """Counts the sequences that have ended, and puts each into its caller's outbox."""
        ended = self._scheduler.ended
        self._metrics.ended(ended)
        for seq in ended:
            if seq.finish_reason == "abort":  # it is the step that has dropped it
                dtype = self._config.torch_dtype
                seq.error = not_finite(seq.num_prompt_tokens, seq.num_completion_tokens, dtype)
            assert seq.outbox is not None
            seq.outbox[seq.seq_id] = seq
        ended.clear()

    def ask_to_drop(self, seq_ids: Iterable[int]) -> None:
        """Has `drop_asked` drop these sequences; it may be called at any time."""
        self._to_drop.extend(seq_ids)

    @property
    def has_some_to_drop(self) -> bool:
        return bool(self._to_drop)

    def drop_asked(self) -> None:
        """Drops those of the sequences that have not ended."""
        seq_ids = list(self._to_drop)
        self._mark_aborted(self._scheduler.abort(seq_ids))
        for _ in seq_ids:  # only now: should this be cut short, it is done again
            self._to_drop.popleft()

    def drop_all(self) -> None:
        self._mark_aborted(self._scheduler.abort_all())
        self.unreported.clear()

    def _mark_aborted(self, seqs: list[Sequence]) -> None:
        """Tells the callers, except those of `step`, which never returns what has been aborted."""
        self._metrics.aborted(seqs)
        for seq in seqs:
            seq.finish_reason = "abort"
            if seq.outbox is not None and seq.outbox is not self.unreported:
                seq.outbox[seq.seq_id] = seq
