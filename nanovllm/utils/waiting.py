"""Waiting for what another process or a GPU does."""

import time
from collections.abc import Callable

SPIN_SECONDS = 0.002
PAUSE_SECONDS = 0.001  # the longest sleep between two looks; ten times as long after a second
Check = Callable[[], None]  # raises to end a wait


def wait_until(is_ready: Callable[[], bool], check: Check) -> None:
    """Waits until `is_ready()`. It spins first, then sleeps longer and longer between two looks.

    Once it sleeps it calls `check` before each look; what `check` raises ends the wait.
    """
    start = time.monotonic()
    pause = 0.0
    while not is_ready():
        waited = time.monotonic() - start
        if waited > SPIN_SECONDS:
            check()
            pause = min(pause + 2e-5, PAUSE_SECONDS if waited < 1 else 10 * PAUSE_SECONDS)
        time.sleep(pause)
