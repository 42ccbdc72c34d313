"""What an engine has done since it was made: what `LLM.metrics` returns, and who counts it.

The counts are taken by the step and by the request, never by the token, so a step pays about a
microsecond. Nothing here takes part in a decision.
"""

from collections import Counter
from collections.abc import Iterable
from time import perf_counter
from typing import TypedDict

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.request_times import RequestTimer
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


class RequestCounts(TypedDict):
    """Requests; each of the n samples of a request counts as one.

    `added` is the sum of the others.

    stop, length: ended so, as in `finish_reason`.
    aborted: dropped by `abort`, by a call that failed or was interrupted, or by a closed stream.
    failed: ended by logits that were NaN or infinite.
    running: hold a row and K/V blocks now.
    waiting: hold none now.
    """

    added: int
    stop: int
    length: int
    aborted: int
    failed: int
    running: int
    waiting: int


class TokenCounts(TypedDict):
    """Tokens.

    prompt: of the prompts of all requests, each counted once, whatever n is.
    completion: that requests have got, those that were aborted or failed included.
    """

    prompt: int
    completion: int


class PrefixCacheCounts(TypedDict):
    """How the prefix cache was used by requests when they got their blocks.

    A preempted request asks again. Without `enable_prefix_caching` nothing is found.

    asked, found: tokens.
    hit_rate: found / asked, 0 before anything was asked.
    """

    asked: int
    found: int
    hit_rate: float


class PoolCounts(TypedDict):
    """Blocks of the K/V pool.

    total: all. used: held by requests now. peak: the most that were held in any step.
    """

    total: int
    used: int
    peak: int


class StepTimes(TypedDict):
    """Steps of one kind, and their times in seconds.

    The time of a step ends when its token ids have been read. It begins when it is scheduled or, if
    the step before it ended later, with that: steps that overlap are not counted twice.
    """

    count: int
    total: float
    mean: float
    max: float


class StepCounts(TypedDict):
    """Steps that computed only prompts, only one token for each of some requests, or both."""

    prefill: StepTimes
    decode: StepTimes
    mixed: StepTimes


class Metrics(TypedDict):
    """What an engine has done since it was made.

    preemptions: how often a request lost its blocks to others and had to compute its tokens again.
    """

    requests: RequestCounts
    tokens: TokenCounts
    prefix_cache: PrefixCacheCounts
    preemptions: int
    blocks: PoolCounts
    steps: StepCounts


class MetricsRecorder:
    """Counts what the engine tells, and adds what the scheduler knows.

    timer: takes the times of requests, None if nobody wants them.
    """

    def __init__(self, scheduler: Scheduler, timer: RequestTimer | None) -> None:
        self._scheduler = scheduler
        self._timer = timer
        self._ended: Counter[str] = Counter()
        self._num_added = 0
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0  # of what has ended
        self._peak = 0
        self._last_completion = 0.0
        self._steps: dict[str, StepTimes] = {
            kind: {"count": 0, "total": 0.0, "mean": 0.0, "max": 0.0}
            for kind in ("prefill", "decode", "mixed")
        }

    def added(self, first: Sequence) -> None:
        """Counts a new request by its first sample."""
        self._num_added += first.sampling_params.n
        self._num_prompt_tokens += first.num_prompt_tokens
        if self._timer is not None:
            self._timer.added(first)

    def ended(self, seqs: Iterable[Sequence]) -> None:
        """Counts samples that have ended by themselves."""
        for seq in seqs:
            is_failure = seq.finish_reason == "abort"  # nobody has dropped it
            self._count_end("failed" if is_failure else str(seq.finish_reason), seq)

    def aborted(self, seqs: Iterable[Sequence]) -> None:
        """Counts samples that were dropped."""
        for seq in seqs:
            self._count_end("aborted", seq)

    def scheduled(self, batch: ScheduledBatch) -> None:
        """Notes the blocks that are in use while a step runs, which is launched next."""
        manager = self._scheduler.block_manager
        self._peak = max(self._peak, manager.num_blocks - manager.num_free_blocks)
        if self._timer is not None:
            self._timer.scheduled(batch)

    def completed(self, batch: ScheduledBatch, scheduled_at: float) -> None:
        """Counts a step whose ids have been read just now.

        scheduled_at: when it began to be scheduled, by `perf_counter`.
        """
        now = perf_counter()
        seconds = now - max(scheduled_at, self._last_completion)
        self._last_completion = now
        if batch.prefill is None:
            times = self._steps["decode"]
        else:
            times = self._steps["prefill" if batch.decode is None else "mixed"]
        times["count"] += 1
        times["total"] += seconds
        times["max"] = max(times["max"], seconds)
        if self._timer is not None:
            self._timer.completed(batch, now)

    def report(self) -> Metrics:
        """Returns all figures as they are now."""
        scheduler, manager = self._scheduler, self._scheduler.block_manager
        unfinished = list(scheduler.unfinished)
        num_unfinished = sum(seq.num_samples for seq in unfinished)
        running = sum(seq.num_samples for seq in unfinished if seq.row is not None)
        asked, found = manager.num_tokens_asked, manager.num_tokens_found
        return {
            "requests": {
                "added": self._num_added,
                "stop": self._ended["stop"],
                "length": self._ended["length"],
                "aborted": self._ended["aborted"],
                "failed": self._ended["failed"],
                "running": running,
                "waiting": num_unfinished - running,
            },
            "tokens": {
                "prompt": self._num_prompt_tokens,
                "completion": self._num_completion_tokens
                + sum(seq.num_completion_tokens for seq in unfinished),
            },
            "prefix_cache": {
                "asked": asked,
                "found": found,
                "hit_rate": found / asked if asked else 0.0,
            },
            "preemptions": scheduler.num_preemptions,
            "blocks": {
                "total": manager.num_blocks,
                "used": manager.num_blocks - manager.num_free_blocks,
                "peak": self._peak,
            },
            "steps": {
                "prefill": _with_mean(self._steps["prefill"]),
                "decode": _with_mean(self._steps["decode"]),
                "mixed": _with_mean(self._steps["mixed"]),
            },
        }

    def _count_end(self, how: str, seq: Sequence) -> None:
        self._ended[how] += seq.num_samples
        self._num_completion_tokens += seq.num_completion_tokens
        if self._timer is not None:
            self._timer.ended(seq)


def _with_mean(times: StepTimes) -> StepTimes:
    """Returns a copy, its mean filled in."""
    copy = times.copy()
    copy["mean"] = times["total"] / times["count"] if times["count"] else 0.0
    return copy
