"""Faults on purpose: something that happens in front of a module's call, and time limits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

# Seconds. What comes at once takes far fewer on a busy machine, too; a hang takes `TIMEOUT` of
# gpu_links.py, minutes, or for ever.
SOON = 60.0
STARTING = 300.0  # for processes to import torch and load a model while others use the cores


class StepError(Exception):
    """Not one that the engine raises itself."""


def fail() -> None:
    raise StepError


def at_call(module: nn.Module, number: int, action: Callable[[], object]) -> None:
    """Runs `action` once, in front of the `number`-th forward from now (1 is the next)."""
    num_calls = 0

    def hook(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            handle.remove()
            action()

    handle = module.register_forward_pre_hook(hook)


@contextmanager
def takes_less_than(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    taken = time.monotonic() - start
    assert taken < seconds, f"took {taken:.1f} s"


def until(is_so: Callable[[], object], seconds: float) -> None:
    """Waits for `is_so` to return something true."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
