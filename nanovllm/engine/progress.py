"""The progress bar of a call."""

from collections import defaultdict
from time import perf_counter

from tqdm import tqdm

from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.sequence import Sequence


class Progress:
    """The progress bar: requests that have ended, and tokens per second of each phase."""

    def __init__(self, num_requests: int, is_shown: bool) -> None:
        self._bar = tqdm(total=num_requests, desc="Generating", disable=not is_shown)
        self._tokens: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._num_ended: dict[int, int] = defaultdict(int)  # samples, by request
        self._last_completion = perf_counter()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def update(self, batch: ScheduledBatch | None, ended: list[Sequence]) -> None:
        """Counts a completed step, if any, and the samples that ended with it."""
        if batch is not None:
            now = perf_counter()
            for phase, count in (("Prefill", batch.num_prefilled), ("Decode", batch.num_decoded)):
                if count:  # a step that does both counts for both, with all its time
                    self._tokens[phase] += count
                    self._seconds[phase] += now - self._last_completion
            self._last_completion = now
            rates = {
                key: f"{self._tokens[key] / self._seconds[key]:.0f}tok/s" for key in self._tokens
            }
            self._bar.set_postfix(rates, refresh=False)
        for seq in ended:
            self._num_ended[seq.request_id] += 1
            if self._num_ended[seq.request_id] == seq.sampling_params.n:
                self._bar.update()
