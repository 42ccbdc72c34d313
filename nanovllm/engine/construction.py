"""What is left of a construction that failed: nothing.

A caller who catches the exception, lowers a knob and tries again needs the memory of the first
try. But an exception holds its traceback, which holds the frames of all functions that it has
left, and their local variables: the model among them.
"""

import gc
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def frees_all_if_it_fails(init: Constructor) -> Constructor:
    """Makes the `__init__` of an engine free all that it has made before its exception leaves."""

    @wraps(init)
    def freeing_init(self: object, *args: Any, **kwargs: Any) -> None:
        handled_before = sys.exc_info()[1]
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            _close(self)
            _clear(error, handled_before)
            raise

    return cast(Constructor, freeing_init)


def _close(engine: object) -> None:
    """Empties an engine that its own `exit` may not be able to end yet."""
    runner = vars(engine).pop("_runner", None)
    vars(engine).clear()
    if runner is not None:
        with suppress(Exception):  # what fails now, as all does after some errors, says less
            runner.exit()


def _clear(error: BaseException, handled_before: BaseException | None) -> None:
    """Frees what `error` and all that led to it hold, but for frames that still run.

    handled_before: what the user was handling when the construction began, which stays whole.
    """
    seen = {id(handled_before)}
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            pending += [current.__cause__, current.__context__]
    gc.collect()  # a module and what hooks into it may refer to each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
