"""Provides fault injection at a module's forward, and time limits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

# In seconds. What should happen at once takes far less even on a busy machine, whereas a hang lasts
# for the `TIMEOUT` of gpu_links.py, which is minutes, or for ever.
SOON = 60.0
STARTING = 300.0  # for processes to import torch and load a model on busy cores


class StepError(Exception):
    """Is an injected failure, of a type that the engine never raises itself."""


def fail() -> None:
    raise StepError


def at_call(module: nn.Module, number: int, action: Callable[[], object]) -> None:
    """Runs `action` once, just before the `number`-th forward from now (1 is the next)."""
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
    """Waits until `is_so` returns something true, and fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
