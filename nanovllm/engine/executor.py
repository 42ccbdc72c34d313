"""Tensor parallelism on one host: rank 0 here, ranks 1 to N-1 in processes of their own.

Every rank gets the same scheduled batches in the same order and keeps the same row state; ids are
read on rank 0 alone. A step that fails on any rank ends the engine: the ranks could not be brought
into step again. Workers end when they are told to, when the pipe to the parent ends, or by force.
"""

import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch, StepHandle
from nanovllm.engine.ipc import Receiver, Sender
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.distributed import TPGroup

EXIT_SECONDS = 5.0  # for a worker to end by itself, then again after SIGTERM
POLL_SECONDS = 0.05
EXIT = b""  # the message that ends a worker


class RankDiedError(RuntimeError):
    """A worker process ended or failed; the engine cannot go on."""


class Worker:
    """The parent's side of one worker process."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        self.rank = rank
        self.process = process
        self.pipe = pipe

    def check(self) -> None:
        """Raises `RankDiedError` once it has ended, with its own traceback if it sent one."""
        if self.process.is_alive() and not self.pipe.poll():
            return
        cause = ""
        if self.pipe.poll():
            with suppress(EOFError):
                cause = f": it raised\n{self.pipe.recv()}"
        self.process.join(EXIT_SECONDS)
        raise RankDiedError(
            f"tensor-parallel rank {self.rank} ended with exit code {self.process.exitcode}"
            f"{cause or '; its output may say why'}"
        )

    def wait_for_hello(self) -> None:
        while not self.pipe.poll(POLL_SECONDS):
            if not self.process.is_alive():
                self.check()
        try:
            self.pipe.recv()
        except EOFError:
            self.check()


class TensorParallelExecutor:
    """Runs batches on `config.tensor_parallel_size` ranks; interchangeable with a `ModelRunner`."""

    def __init__(self, config: Config) -> None:
        if getattr(current_process(), "_inheriting", False):
            raise RuntimeError(
                "tensor_parallel_size > 1 starts processes that import your script again; put its "
                'main part under `if __name__ == "__main__":`'
            )
        size = config.tensor_parallel_size
        self._workers: list[Worker] = []
        self._directory = tempfile.mkdtemp(prefix="nanovllm-")
        self._sender = Sender(size - 1, self._check_workers)
        self._finalizer = weakref.finalize(
            self, _clean_up, self._workers, self._sender, self._directory
        )
        store_file = os.path.join(self._directory, "store")
        self._runner: ModelRunner | None = None
        try:
            for rank in range(1, size):
                self._workers.append(_spawn(config, rank, store_file, self._sender.name))
            for worker in self._workers:
                worker.wait_for_hello()
            self._runner = ModelRunner(config, TPGroup.connect(0, size, store_file))
            shutil.rmtree(self._directory)  # all have met; should we be killed, nothing is left
        except BaseException as error:
            self._fail(error)
            raise
        self.num_blocks = self._runner.num_blocks

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        if self._runner is None:
            raise RankDiedError("a step has failed on one of the ranks; make a new LLM")
        try:
            self._sender.send(pickle.dumps(batch))
            return self._runner.launch(batch)
        except BaseException as error:
            self._fail(error)
            raise

    def exit(self) -> None:
        """Ends all ranks and frees everything. Idempotent."""
        self._runner = None
        self._finalizer()

    def _check_workers(self) -> None:
        for worker in self._workers:
            worker.check()

    def _fail(self, error: BaseException) -> None:
        """Ends all ranks; if a worker's end is behind `error`, raises that instead."""
        died = None
        deadline = time.monotonic() + (1.0 if isinstance(error, Exception) else 0.0)
        while died is None and time.monotonic() < deadline:
            try:
                self._check_workers()
                time.sleep(POLL_SECONDS)
            except RankDiedError as cause:
                died = cause
        self.exit()
        if died is not None:
            raise died from error


def _clean_up(workers: list[Worker], sender: Sender, directory: str) -> None:
    """Ends the workers, gently if they listen, and removes what the ranks shared."""
    with suppress(RankDiedError):
        sender.send(EXIT)
    end: Callable[[BaseProcess], None]
    for end in (lambda process: None, BaseProcess.terminate, BaseProcess.kill):
        deadline = time.monotonic() + EXIT_SECONDS
        for worker in workers:
            if worker.process.is_alive():
                end(worker.process)
        for worker in workers:
            worker.process.join(max(deadline - time.monotonic(), 0))
    for worker in workers:
        worker.pipe.close()
    sender.close()
    shutil.rmtree(directory, ignore_errors=True)


def _spawn(config: Config, rank: int, store_file: str, channel: str) -> Worker:
    context = get_context("spawn")
    pipe, workers_pipe = context.Pipe()
    process = context.Process(
        target=worker_main,
        args=(config, rank, store_file, channel, workers_pipe),
        name=f"nanovllm-rank-{rank}",
        daemon=True,
    )
    process.start()
    workers_pipe.close()  # the worker's copy is the only one: its end is the worker's end
    return Worker(rank, process, pipe)


def worker_main(config: Config, rank: int, store_file: str, channel: str, pipe: Connection) -> None:
    """A worker process: says hello, builds its runner, and launches what it receives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    size = config.tensor_parallel_size

    def check_parent() -> None:
        if pipe.poll():  # nothing is ever sent: the pipe has ended, and so has the parent
            os._exit(1)

    try:
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
        receiver = Receiver(channel, size - 1, rank - 1, check_parent)
        pipe.send("hello")
        runner = ModelRunner(config, TPGroup.connect(rank, size, store_file))
        while message := receiver.receive():
            runner.launch(pickle.loads(message))
        runner.exit()
        receiver.close()
    except BaseException:
        if not pipe.poll():
            pipe.send(traceback.format_exc())
        os._exit(1)
