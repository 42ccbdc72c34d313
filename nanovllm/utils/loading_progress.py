"""Shows how far a load of some seconds has come."""

from time import monotonic
from types import TracebackType

from tqdm import tqdm

PROGRESS_SECONDS = 3.0  # a shorter load shows no progress bar


class LoadingProgress:
    """A progress bar that is made when a load has taken some seconds.

    Not before, since tqdm makes a semaphore with its first bar, about which Python warns if the
    process is ended by a signal.
    """

    def __init__(self, total_bytes: int, *, is_shown: bool) -> None:
        self._total_bytes = total_bytes
        self._is_shown = is_shown
        self._start = monotonic()
        self._num_bytes = 0
        self._bar: tqdm | None = None

    def __enter__(self) -> "LoadingProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, num_bytes: int) -> None:
        """Notes that so many more bytes are there."""
        self._num_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._is_shown and monotonic() - self._start > PROGRESS_SECONDS:
            self._bar = tqdm(
                total=self._total_bytes,
                initial=self._num_bytes,
                desc="Loading weights",
                unit="B",
                unit_scale=True,
            )
