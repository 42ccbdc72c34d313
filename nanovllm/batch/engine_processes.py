"""Engines in processes of their own, each with GPUs of its own, that share the rows of a job."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any

from nanovllm.batch.engines import Answer, LocalEngine
from nanovllm.batch.requests import Request


class EngineProcesses:
    """Engines in processes of their own, each with GPUs of its own.

    When one dies, the others take over its rows.
    """

    def __init__(self, keywords: dict[str, Any], gpus: list[str | None]) -> None:
        """gpus: for each engine the GPUs that it sees, as CUDA_VISIBLE_DEVICES; None for no change.

        Raises `ValueError` if an engine cannot be made.
        """
        self._rows: dict[int, Request] = {}
        self._workers: list[_Worker] = []
        try:
            for visible in gpus:
                self._workers.append(_Worker(keywords, visible))
            for worker in self._workers:
                worker.window = worker.started()
        except BaseException:
            self.exit()
            raise

    @property
    def num_pending(self) -> int:
        return len(self._rows)

    def room(self) -> int:
        return sum(worker.window - len(worker.rows) for worker in self._workers)

    def submit(self, index: int, request: Request) -> None:
        self._rows[index] = request
        self._give(index)

    def poll(self) -> list[Answer]:
        answers: list[Answer] = []
        ready = wait([worker.connection for worker in self._workers])
        for worker in [w for w in self._workers if w.connection in ready]:
            try:
                received: list[Answer] = worker.connection.recv()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            for index, _ in received:
                worker.rows.remove(index)
                del self._rows[index]
            answers += received
        return answers

    def exit(self) -> None:
        for worker in self._workers:
            worker.stop()

    def _give(self, index: int) -> None:
        """Sends a row to the engine that has the most room."""
        worker = max(self._workers, key=lambda w: w.window - len(w.rows))
        worker.rows.add(index)
        try:
            worker.connection.send((index, self._rows[index]))
        except OSError:
            self._bury(worker)

    def _bury(self, worker: "_Worker") -> None:
        """Gives the rows of an engine that has died to the others; raises if there is none."""
        self._workers.remove(worker)
        exit_code = worker.stop()
        if not self._workers:
            raise RuntimeError(f"the last engine has died with exit code {exit_code}")
        for index in sorted(worker.rows):
            self._give(index)


class _Worker:
    """The parent's side of an engine process.

    window: the rows that it may have at a time.
    rows: the numbers of those that it has.
    """

    def __init__(self, keywords: dict[str, Any], visible: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.window = 0
        self.rows: set[int] = set()
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, keywords))
        with _environment("CUDA_VISIBLE_DEVICES", visible):
            self._process.start()
        theirs.close()

    def started(self) -> int:
        """Waits until the engine is there and returns its window; raises `ValueError` if not."""
        try:
            reply: int | str = self.connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"an engine has died with exit code {self._process.exitcode} while starting"
            ) from None
        if isinstance(reply, str):
            raise ValueError(reply)
        return reply

    def stop(self) -> int | None:
        """Ends the process and returns its exit code."""
        self.connection.close()  # the sign to leave
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _serve(connection: Connection, keywords: dict[str, Any]) -> None:
    """Serves the rows that come through a connection until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        engine = LocalEngine(keywords)
    except (TypeError, ValueError) as error:
        connection.send(str(error))
        return
    rows: SimpleQueue[tuple[int, Request] | None] = SimpleQueue()
    # In a thread: if both sides wrote while neither read, both would wait for ever.
    Thread(target=_receive, args=(connection, rows), daemon=True).start()
    try:
        connection.send(engine.window)
        while True:
            while not engine.num_pending or (engine.room() > 0 and not rows.empty()):
                if (row := rows.get()) is None:
                    return
                engine.submit(*row)
            if answers := engine.poll():
                connection.send(answers)
    except OSError:  # the parent is gone
        return
    finally:
        engine.exit()


def _receive(connection: Connection, rows: "SimpleQueue[tuple[int, Request] | None]") -> None:
    """Puts what comes through a connection into a queue, and None when it is closed."""
    try:
        while True:
            rows.put(connection.recv())
    except (EOFError, OSError):
        rows.put(None)


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Sets a variable for the processes that are started within; None leaves it as it is."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def gpus_for_engines(data_parallel_size: int, tensor_parallel_size: int) -> list[str | None]:
    """Returns which GPUs each engine sees, as CUDA_VISIBLE_DEVICES; None where there are none.

    data_parallel_size: 0 for as many as there are GPUs for.

    Raises `ValueError` if there are too few.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return [None] * max(data_parallel_size, 1)
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ids = named if len(named) == num_gpus else [str(i) for i in range(num_gpus)]
    size = data_parallel_size or num_gpus // tensor_parallel_size
    if not 0 < size * tensor_parallel_size <= num_gpus:
        raise ValueError(
            f"{max(size, 1)} engines of {tensor_parallel_size} GPUs each need "
            f"{max(size, 1) * tensor_parallel_size}, but there are {num_gpus}"
        )
    starts = range(0, size * tensor_parallel_size, tensor_parallel_size)
    return [",".join(ids[start : start + tensor_parallel_size]) for start in starts]
