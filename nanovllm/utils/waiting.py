"""Polling for a condition that another process or a GPU will fulfil."""

import time
from collections.abc import Callable

SPIN_SECONDS = 0.002
PAUSE_SECONDS = 0.001  # the longest sleep between two polls; ten times as long after a second
Check = Callable[[], None]  # ends a wait by raising


def wait_until(is_ready: Callable[[], bool], check: Check) -> None:
    """Polls until `is_ready()`: spins at first, then sleeps longer and longer between two polls.

    Once it sleeps, it calls `check` before each poll; an exception from `check` ends the wait.
    """
    start = time.monotonic()
    pause = 0.0
    while not is_ready():
        waited = time.monotonic() - start
        if waited > SPIN_SECONDS:
            check()
            pause = min(pause + 2e-5, PAUSE_SECONDS if waited < 1 else 10 * PAUSE_SECONDS)
        time.sleep(pause)
