"""Ctrl-C between two steps, not within one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the yielded function is called or the block ends.

    A second Ctrl-C acts at once. Nothing is held back in other threads, which may not set signal
    handlers, nor where the signal is not handled in Python.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    is_interrupted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, previous)

    def raise_if_interrupted() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
        raise_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, previous)
