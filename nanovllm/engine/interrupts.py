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
    handlers, nor from a handler of the user's own, which is called as ever.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous is not signal.default_int_handler:
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
