"""Starts the processes of ranks and engines from one that has imported torch and nanovllm already.

multiprocessing's "spawn" lets each process import them again, which takes seconds of a core. Here a
server has done so; it forks for each process twice, so that Linux makes the second fork a child of
the process that asked, as a spawned one is. It has no thread and has run nothing, so a fork begins
as a new process does. Scripts that tests run as users do still spawn theirs.
"""

import ctypes
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import util
from threading import Lock

PACKAGES = ("nanovllm.batch.engine_processes", "nanovllm.engine.worker_process", "pytest")
CPU_KERNELS = "nanovllm.kernels.cpu"  # need numba
NAME = "spawn_main"  # of the processes, as in the command of one that multiprocessing spawns
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
MAX_BYTES = 1 << 17  # of a request, which is mostly the environment
MAX_FILES = 64


class WarmProcesses:
    """Takes the place of `multiprocessing.util.spawnv_passfds`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._connection: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._spawn = util.spawnv_passfds

    def start(self, path: bytes, arguments: list[str], files: list[int]) -> int:
        """Starts a process with the open `files`, under the same numbers, and returns its id."""
        program = arguments[-2]
        if arguments[-1] != "--multiprocessing-fork":  # the resource tracker
            return self._spawn(path, arguments, files)
        numbers = sorted({0, 1, 2, *files})
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        request = pickle.dumps((program, numbers, dict(os.environ), os.getcwd(), mask, os.getpid()))
        with self._lock:
            connection = self._connected()
            _adopt_orphans(True)
            try:
                socket.send_fds(connection, [request], numbers)
                return int(connection.recv(MAX_BYTES))
            finally:
                _adopt_orphans(False)

    def end(self) -> None:
        if self._connection is not None and self._server is not None:
            self._connection.close()
            self._server.wait()

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-m", "tests.helpers.warm_processes", str(theirs.fileno())]
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            theirs.close()
        return self._connection


def _adopt_orphans(does: bool) -> None:
    """Makes this process the parent of its descendants whose own parent ends, or init again."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(does))


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}, {value!r}) failed")


def _serve(connection: socket.socket) -> None:
    """Forks for each request, and returns in the forks only."""
    while True:
        request, files, *_ = socket.recv_fds(connection, MAX_BYTES, MAX_FILES)
        if not request:
            os._exit(0)
        ids, ids_out = os.pipe()
        between = os.fork()
        if between == 0:
            process = os.fork()
            if process == 0:
                os.close(ids)
                os.close(ids_out)
                connection.close()
                _become(files, *pickle.loads(request))
                return
            os.write(ids_out, str(process).encode())
            os._exit(0)
        os.waitpid(between, 0)
        for file in (*files, ids_out):
            os.close(file)
        connection.send(os.read(ids, MAX_BYTES))
        os.close(ids)


def _become(
    files: list[int],
    program: str,
    numbers: list[int],
    environment: dict[str, str],
    directory: str,
    mask: list[int],
    parent: int,
) -> None:
    """Takes what a spawned process gets from its parent, and runs the program."""
    while os.getppid() != parent:  # the process between ends soon
        time.sleep(0.001)
    high = [os.dup2(file, 1000 + i, inheritable=False) for i, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    _prctl(PR_SET_NAME, NAME.encode())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    sys.argv = ["-c", "--multiprocessing-fork"]
    exec(program, {})


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PACKAGES:
        importlib.import_module(name)
    if importlib.util.find_spec("numba") is not None:
        importlib.import_module(CPU_KERNELS)
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
