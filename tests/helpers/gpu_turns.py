"""Lets tests marked `alone`, which measure the GPU's memory or need most of it, run while no other
process of this suite allocates any."""

import gc
import os
import tempfile
from collections.abc import Generator
from typing import IO

import pytest
import torch


class Turns:
    """Is a lock between processes, held either by several together or by one alone. While a process
    waits to hold it alone, no later process overtakes it. The lock is released when its holder
    ends, even if it is killed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: IO[bytes] | None = None
        self._is_alone = False

    def take(self, *, alone: bool) -> None:
        """Waits for the lock, unless this process already holds it in the same mode."""
        if self._held is not None and self._is_alone == alone:
            return
        self.release()
        import fcntl  # this module is missing on Windows, but present where the GPU tests run

        with open(f"{self._path}.turnstile", "ab") as turnstile:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            self._held = open(self._path, "ab")  # noqa: SIM115
            fcntl.flock(self._held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        self._is_alone = alone

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()


class GPUTurns:
    """Makes every test hold the lock from the set-up of its fixtures to their teardown."""

    def __init__(self) -> None:
        name = f"gpu-of-{os.getuid()}-for-tests-of-nanovllm"
        self._turns = Turns(os.path.join(tempfile.gettempdir(), name))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._turns.take(alone="alone" in item.keywords)
        try:
            return (yield)
        finally:  # tests marked `alone` run in a row, so that the others have to stop only once
            if "alone" in item.keywords and torch.cuda.is_initialized():
                gc.collect()
                torch.cuda.empty_cache()  # else torch keeps freed memory from other processes
            if "alone" not in item.keywords or nextitem is None or "alone" not in nextitem.keywords:
                self._turns.release()

    def pytest_sessionfinish(self) -> None:
        self._turns.release()
