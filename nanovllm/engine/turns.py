"""Which of the threads that call an engine steps it, and how the others wait.

One caller drives: it runs step after step until its own requests have ended. Steps serve the
requests of all callers, so the others sleep until a step has news for them, or until they are to
drive. Who drives is a matter of politeness alone; only the holder of `room` touches the engine's
state. All that ever blocks are C locks within `with`, which no signal handler that raises can leave
held, and no sleeper relies on being woken.
"""

import os
from contextlib import suppress
from threading import Lock, RLock
from typing import Any

from nanovllm.engine.sequence import Sequence

SLEEP_SECONDS = 0.2  # after which a sleeper looks for itself, should nobody have woken it


class Caller:
    """A call whose requests steps are to serve.

    wants_all_steps: every step is news, not only those in which one of its sequences ends.
    ended: its outbox: those of its sequences that have ended, by id.
    firsts: the first sample of each of its requests.
    """

    __slots__ = ("_bell", "_num_steps", "ended", "firsts", "wants_all_steps")

    def __init__(self, wants_all_steps: bool = False) -> None:
        self.wants_all_steps = wants_all_steps
        self.ended: dict[int, Sequence] = {}
        self.firsts: list[Sequence] = []
        self._num_steps = 0  # that had completed when it looked for news
        self._bell = Lock()
        self._bell.acquire()

    def take_ended(self) -> list[Sequence]:
        """Returns the sequences that have ended since the last call."""
        taken = []
        while self.ended:  # another thread may be adding to it
            taken.append(self.ended.popitem()[1])
        return taken

    def wake(self) -> None:
        with suppress(RuntimeError):  # woken already
            self._bell.release()

    def sleep(self) -> None:
        self._bell.acquire(timeout=SLEEP_SECONDS)


class Turns:
    """Orders the threads of one engine in the process that made it.

    room: held by the thread that uses the engine's state.
    door: held by a thread that wants the room for something short, and then for as long as it has
        it. The driver passes the door before each step, so it lets that thread in first.
    """

    def __init__(self) -> None:
        # With RLocks, a thread can ask whether it is the owner.
        self.door: Any = RLock()
        self.room: Any = RLock()
        self._process_id = os.getpid()
        self._driver: Caller | None = None
        self._sleepers: list[Caller] = []
        self._num_steps = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child of the process that the engine belongs to."""
        return os.getpid() != self._process_id

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the middle of a use of the engine: what asks is a signal
        handler or a finalizer, or the engine calls it."""
        return bool(self.room._is_owned() or self.door._is_owned())

    def check(self) -> None:
        """Raises `RuntimeError` if the engine cannot be used here."""
        if self.is_elsewhere:
            raise RuntimeError(
                f"this engine belongs to process {self._process_id}, and this is a forked child; "
                "make an LLM in the child instead, and start it by the method 'spawn'"
            )
        if self.is_inside:
            raise RuntimeError(
                "this thread is in the middle of a step of this engine; what interrupts a step, "
                "such as a signal handler, may only call abort() and exit()"
            )

    def may_drive(self, caller: Caller) -> bool:
        """Returns whether `caller` shall step, since it drives or nobody else does."""
        if self._driver is None:
            self._driver = caller
        return self._driver is caller

    def look(self, caller: Caller) -> None:
        """Notes that `caller` looks for news: later steps are news to one that wants all."""
        caller._num_steps = self._num_steps

    def sleep(self, caller: Caller) -> None:
        """Waits for news, or for the end of the driver's call; a while at most."""
        num_steps = self._num_steps
        self._sleepers.append(caller)
        try:
            # It is among the sleepers by now, so what happens after these questions wakes it.
            has_news = caller.ended or (caller.wants_all_steps and num_steps > caller._num_steps)
            if self._driver is None or has_news:
                return
            caller.sleep()
        finally:
            self._sleepers.remove(caller)
        if self._num_steps == num_steps and not caller.ended:
            self._driver = None  # it has died, or its step is long and to drive as well is harmless

    def note_step(self) -> None:
        """Wakes those for whom the completed step has news."""
        self._num_steps += 1
        for caller in list(self._sleepers) if self._sleepers else ():
            if caller.ended or caller.wants_all_steps:
                caller.wake()

    def leave(self, caller: Caller) -> None:
        """Lets another caller drive, if this one does or nobody is known to."""
        if self._driver is caller:
            self._driver = None
        if self._driver is None:
            for sleeper in list(self._sleepers)[:1]:
                sleeper.wake()

    def wake_all(self) -> None:
        for sleeper in list(self._sleepers):
            sleeper.wake()
