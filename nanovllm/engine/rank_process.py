"""A process of Python that this package starts for a rank.

It is started by `subprocess` rather than `multiprocessing`: so it never imports the user's script
again (one on stdin or in a notebook could not be), a daemonic process may start it, and a forked
copy of the parent does not take it for a child of its own and end it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

START = "import sys; sys.path[:] = {path!r}; from {module} import start; start({pipe}, {parent})"


class RankProcess:
    """Runs `start` of a module with a pipe to this process and with this process's id.

    pipe: our end of the pipe. The process has the only other one, which its end closes.
    """

    def __init__(self, module: str, fds: tuple[int, ...]) -> None:
        """Starts the process, which inherits the file descriptors `fds` under the same numbers."""
        self.pipe, its_pipe = Pipe()
        sentinel, its_sentinel = os.pipe()
        self._sentinel = Connection(sentinel, writable=False)
        code = START.format(
            path=[str(entry) for entry in sys.path],
            module=module,
            pipe=its_pipe.fileno(),
            parent=os.getpid(),
        )
        try:
            with _interrupts_blocked():
                self._popen = _start(code, (its_pipe.fileno(), its_sentinel, *fds))
        finally:
            its_pipe.close()
            os.close(its_sentinel)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, or minus the signal that ended the process; None while it runs."""
        return self._popen.poll()

    @property
    def sentinel(self) -> Connection:
        """Is ready to be read once the process has ended."""
        return self._sentinel

    def send(self, message: Any) -> None:
        """Sends what the process will receive from its pipe, unless it has ended already."""
        with suppress(OSError):
            self.pipe.send(message)

    def join(self, seconds: float) -> None:
        """Waits for the end, for so many seconds at most."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(seconds, 0))

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """Closes our end of the pipe. Somebody may still wait for the sentinel, so that stays."""
        self.pipe.close()


def _start(code: str, fds: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)


def wait_for_end_of_any(processes: list[RankProcess]) -> None:
    wait([process.sentinel for process in processes])


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Starts processes that never get a Ctrl-C: the parent handles it for all."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
