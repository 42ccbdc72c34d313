"""Who may use the GPU when: tests marked `alone` measure its memory, or need most of it, so that no
other process of this suite may then allocate any."""

import gc
import os
import tempfile
from collections.abc import Generator
from typing import IO

import pytest
import torch


class Turns:
    """A lock that processes hold together, or one of them alone. Who waits to be alone lets nobody
    pass that comes later. A process's end, however it comes, ends its turn."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: IO[bytes] | None = None
        self._is_alone = False

    def take(self, *, alone: bool) -> None:
        """Waits for a turn; goes on with the one in hand if it is of the kind."""
        if self._held is not None and self._is_alone == alone:
            return
        self.release()
        import fcntl  # where there are GPUs it is there

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
    """Gives every test, its fixtures included, a turn."""

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
        finally:  # those that need it alone follow each other: others need not stop for each
            if "alone" in item.keywords and torch.cuda.is_initialized():
                gc.collect()
                torch.cuda.empty_cache()  # torch keeps what is freed: others would not get it
            if "alone" not in item.keywords or nextitem is None or "alone" not in nextitem.keywords:
                self._turns.release()

    def pytest_sessionfinish(self) -> None:
        self._turns.release()
