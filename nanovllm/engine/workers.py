"""Starts, watches and ends the processes of ranks 1 to N-1, by force if need be."""

import os
import pickle
import shutil
import tempfile
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Thread, current_thread
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.ipc import Sender
from nanovllm.engine.rank_process import RankProcess, wait_for_end_of_any
from nanovllm.engine.worker_process import WorkerArguments, connect
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_links import GPULinks
from nanovllm.utils.waiting import Check

EXIT_SECONDS = 5.0  # for a worker to end by itself, then again by force
CAUSE_SECONDS = 5.0  # for the news of a worker's end to arrive after its connections have closed
POLL_SECONDS = 0.05
LAST_SECONDS = 1.0  # for a thread that has done its work


class RankDiedError(RuntimeError):
    """A worker process ended or failed; the engine cannot go on."""


class Worker:
    """One worker process as the parent sees it, and what has become of it."""

    def __init__(self, rank: int, process: RankProcess) -> None:
        self.rank = rank
        self.process = process
        self.is_ready = False
        self.failure: RankDiedError | None = None
        self.has_lost_peer = False

    def look(self) -> None:
        """Takes note of what the worker has sent and whether it has ended."""
        report = ""
        has_ended = self.process.exitcode is not None  # asked first: what it sent is then there
        pipe = self.process.pipe
        try:
            while not report and pipe.poll():
                report, self.has_lost_peer = pipe.recv()
                self.is_ready = True
        except (EOFError, OSError):
            has_ended = True
        if self.failure is None and (has_ended or report):
            self.process.join(EXIT_SECONDS)
            self.failure = RankDiedError(
                f"tensor-parallel rank {self.rank} ended with exit code {self.process.exitcode}"
                + (f": it raised\n{report}" if report else "; its output may say why")
            )


class Workers:
    """The processes of ranks 1 to N-1 and what this process shares with them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._sender: Sender | None = None
        self._directory: str | None = None
        self._group: TPGroup | None = None
        self._watcher: Thread | None = None

    def start(self, config: Config) -> TPGroup:
        """Spawns the workers, meets them, and returns the group of all ranks."""
        size = config.tensor_parallel_size
        self._sender = Sender(size - 1)
        self._directory = tempfile.mkdtemp(prefix="nanovllm-")
        store_file = os.path.join(self._directory, "store")
        channel = self._sender.channel
        num_threads = max(torch.get_num_threads() // size, 1)
        for rank in range(1, size):
            process = RankProcess("nanovllm.engine.worker_process", fds=(channel.fd,))
            self._workers.append(Worker(rank, process))
            process.send(
                WorkerArguments(config.on_rank(rank), rank, num_threads, store_file, channel)
            )
        while not all(worker.is_ready for worker in self._workers):
            self.check()
            time.sleep(POLL_SECONDS)
        self._group = self._connect(config.on_rank(0), store_file)
        shutil.rmtree(self._directory)  # all have met: should we be killed now, nothing is left
        return self._group

    def _connect(self, config: Config, store_file: str) -> TPGroup:
        """Meets the workers in a thread, and leaves that thread to watch them afterwards.

        So Ctrl-C, and a worker that ends before it is there, are noticed meanwhile.
        """
        processes = [worker.process for worker in self._workers]
        future: Future[TPGroup] = Future()

        def meet_and_watch() -> None:
            try:
                future.set_result(connect(config, 0, store_file))
            except BaseException as error:
                future.set_exception(error)
            else:
                _abort_with_first(processes, future.result().links)

        self._watcher = Thread(target=meet_and_watch, daemon=True)
        self._watcher.start()
        try:
            while not future.done():
                self.check()
                wait([future], POLL_SECONDS)
            return future.result()
        except BaseException:
            future.add_done_callback(_end_links)  # should it come yet, nobody else will
            raise

    def send(self, method: str, *arguments: Any, check: Check | None = None) -> None:
        """Tells the workers to call this method of their runners; `check` is called meanwhile."""
        assert self._sender is not None
        self._sender.send(pickle.dumps((method, arguments)), check or self.check)

    def check(self) -> None:
        """Raises `RankDiedError` once a worker has ended."""
        failures = self._failures()
        if failures:
            raise failures[0]

    def wait_for_cause(self) -> RankDiedError | None:
        """Returns the worker's end that explains why others are lost; waits a while for it."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while not self._failures(of_their_own=True) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return next(iter(self._failures(of_their_own=True) + self._failures()), None)

    def _failures(self, of_their_own: bool = False) -> list[RankDiedError]:
        for worker in self._workers:
            worker.look()
        return [
            worker.failure
            for worker in self._workers
            if worker.failure is not None and not (of_their_own and worker.has_lost_peer)
        ]

    def end(self, gently: bool = True) -> None:
        """Ends the workers and removes what was shared. A second call does nothing.

        Workers that do not end in time are killed; so are all if not `gently`, and on Ctrl-C.
        """
        try:
            if gently and not self._failures():
                self._ask_to_exit()
        finally:
            processes = [worker.process for worker in self._workers]
            for process in processes:
                process.kill()
            for process in processes:
                process.join(EXIT_SECONDS)
            for process in processes:
                process.close()
            self._workers.clear()
            if self._sender is not None:
                self._sender.close()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)

    def close_links(self) -> None:
        """Frees what joins the GPUs, once the first worker's end has aborted it.

        A second call does nothing.
        """
        group, self._group = self._group, None
        watcher, self._watcher = self._watcher, None
        # A garbage collection in the watching thread may end an engine whose links it would abort.
        is_watcher = watcher is current_thread()
        if group is not None and group.links is not None:
            if is_watcher:
                group.links.end()
            else:
                group.links.close()
        if watcher is not None and not is_watcher:
            # Were it to drop NCCL after the interpreter's end has begun, the process would abort.
            watcher.join(LAST_SECONDS)

    def _ask_to_exit(self) -> None:
        deadline = time.monotonic() + EXIT_SECONDS

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        if self._sender is not None and self._workers:
            with suppress(TimeoutError):
                self.send("exit", check=check)
        for worker in self._workers:
            worker.process.join(deadline - time.monotonic())


def _end_links(future: "Future[TPGroup]") -> None:
    if future.exception() is None and (links := future.result().links) is not None:
        links.end()


def _abort_with_first(processes: list[RankProcess], links: GPULinks | None) -> None:
    """Aborts the links between the GPUs as soon as a worker has ended, however it did.

    Otherwise this GPU would wait for the other one without end, and the host for this GPU.
    """
    if links is None:
        return
    wait_for_end_of_any(processes)
    with suppress(RuntimeError):  # NCCL may have found out itself
        links.abort()
