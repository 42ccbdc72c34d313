"""What is left of a construction that failed: nothing.

A caller who catches the exception, lowers a knob and tries again needs the memory of the first
try. But an exception holds its traceback, which holds the frames of all functions that it has
left, and their local variables: the model among them.
"""

import gc
import traceback
from typing import Protocol

import torch


class Closable(Protocol):
    def exit(self) -> None: ...


def release(
    error: BaseException, runner: Closable | None, handled_before: BaseException | None
) -> None:
    """Frees what an `error` and all that led to it hold, and `runner`.

    Frames that still run, the caller's own among them, are left as they are.

    handled_before: what the user was handling when the construction began, which stays whole.
    """
    if runner is not None:
        runner.exit()
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
