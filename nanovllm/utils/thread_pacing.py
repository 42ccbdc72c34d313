"""Gives a CPU's steps fewer threads while other programs keep its cores busy.

Threads that share a small piece of work wait for the slowest of them. If a core is busy with
something else, that one waits for its turn on the core, a few milliseconds each time: two threads
with one free core are 3 to 8 times as slow as one. Linux counts how long each thread has been ready
to run without a core; where it does not, nothing is done. Results do not depend on any of this.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

logger = logging.getLogger("nanovllm")

WINDOW = 0.25  # seconds of steps between two looks
MAX_SHARE = 0.1  # of that time that all threads together may wait for cores
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 160.0  # seconds until all threads are tried again


def seconds_without_core() -> float | None:
    """Returns how long the threads of this process have waited for a core, None if unknown."""
    total, is_known = 0, False
    try:
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/schedstat") as file:
                    total += int(file.read().split()[1])
                    is_known = True
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
    except (OSError, ValueError, IndexError):
        return None
    return total / 1e9 if is_known else None


class ThreadPacing:
    """Says how many of torch's threads each step gets.

    If threads wait for cores, it takes away as many as wait at a time, and goes on until none does
    or one is left. After a pause it tries all again; each time that this fails the next pause is
    twice as long.

    waited: what `seconds_without_core` does. clock: seconds that pass.
    """

    def __init__(
        self,
        waited: Callable[[], float | None] = seconds_without_core,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._waited = waited
        self._clock = clock
        self._num_taken = 0
        self._stepped = 0.0  # seconds of steps since the last look
        waited_before = waited()
        self._is_known = waited_before is not None
        self._waited_before = waited_before or 0.0
        self._pause = FIRST_PAUSE
        self._retry_at = 0.0
        self._has_warned = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Runs a step on the threads that it gets; torch has all its threads again after."""
        available = torch.get_num_threads()
        if available == 1 or not self._is_known:
            yield
            return
        used = max(available - self._num_taken, 1)
        torch.set_num_threads(used)
        start = self._clock()
        try:
            yield
        finally:
            torch.set_num_threads(available)
            self._stepped += self._clock() - start
        if self._stepped >= WINDOW:
            self._look(available, used)

    def _look(self, available: int, used: int) -> None:
        """Decides about the next steps by how long threads have waited in the last ones."""
        waited = self._waited()
        if waited is None:
            self._is_known = False
            self._num_taken = 0
            return
        share = (waited - self._waited_before) / self._stepped
        self._waited_before, self._stepped = waited, 0.0
        if share > MAX_SHARE and used > 1:
            if self._num_taken == 0:
                self._retry_at = self._clock() + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            left = max(used - math.ceil(share), 1)
            self._num_taken = available - left
            self._say(left, available, share)
        elif self._num_taken == 0:
            self._pause = FIRST_PAUSE
        elif self._clock() >= self._retry_at:
            self._num_taken = 0

    def _say(self, left: int, available: int, share: float) -> None:
        """Warns once; what follows is of interest to few."""
        logger.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "other programs keep this CPU busy: threads waited for a core for %.0f %% of a step's "
            "time; steps now take %d of torch's %d threads, and try more again later",
            100 * share,
            left,
            available,
        )
        self._has_warned = True
