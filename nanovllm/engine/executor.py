"""Tensor parallelism on one host: rank 0 here, ranks 1 to N-1 in processes of their own.

What rank 0's runner is asked to do, the others are told as pickled (method, arguments), through the
shared memory of ipc.py. So all runners make the same calls in the same order and keep the same
state. Results are those of rank 0. A call that fails on any rank ends the engine: the ranks could
not be brought into step again.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.util import Finalize
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch, StepHandle, StepLogprobs
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.workers import RankDiedError, Workers
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.distributed import has_gloo
from nanovllm.utils.given_weights import GivenWeights
from nanovllm.utils.gpu_links import PeerLostError, has_nccl


class TensorParallelExecutor:
    """A `ModelRunner` on each of `config.tensor_parallel_size` ranks, used as if it were one."""

    def __init__(self, config: Config) -> None:
        _check(config)
        self._ranks = _Ranks()
        self._failure = "it was closed"  # what has ended the ranks, in words
        self._config = config
        # At the interpreter's end it runs before multiprocessing joins what is left, unlike
        # weakref.finalize; in a forked child never.
        self._finalizer = Finalize(self, self._ranks.end, exitpriority=0)
        try:
            group = self._ranks.workers.start(config)
            with _share_of_threads(config):
                runner = self._ranks.runner = ModelRunner(config.on_rank(0), group)
        except BaseException as error:
            self._fail(error)
            raise
        self.num_blocks = runner.num_blocks
        self.description = runner.description
        self.reads_prefixes_once = runner.reads_prefixes_once

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        return _ParallelStep(self.call("launch", batch), self._fail)

    def update_weights(self, source: Checkpoint | GivenWeights) -> None:
        """Does what the runner's method says on all ranks, which read tensors from files."""
        runner = self._ranks.runner
        if runner is not None:
            runner.check_weights(source)  # what is wrong on one rank is so on all
        with TemporaryDirectory(prefix="nanovllm-") as directory:
            saved = source.save(directory) if isinstance(source, GivenWeights) else source
            self.call("update_weights", saved)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls this method of the `ModelRunner` on every rank; returns what rank 0's returns.

        It does not wait for the other ranks. The arguments are pickled.
        """
        runner = self._ranks.runner
        if runner is None:
            raise RankDiedError(
                f"this engine has ended, since a call failed on one of its ranks: {self._failure}; "
                "make a new LLM"
            )
        try:
            self._ranks.workers.send(method, *arguments)
            with _share_of_threads(self._config):
                return getattr(runner, method)(*arguments)
        except BaseException as error:
            self._fail(error)
            raise

    def exit(self) -> None:
        """Ends all ranks and frees everything. A second call does nothing."""
        self._ranks.end()

    def _fail(self, error: BaseException) -> None:
        """Ends all ranks; raises another rank's end instead if that caused `error`."""
        cause = None
        self._failure = _shown(error)
        try:
            if isinstance(error, PeerLostError | RankDiedError):
                cause = self._ranks.workers.wait_for_cause()
                self._failure = _shown(cause or error)
        finally:
            with suppress(Exception):  # what fails now, as all does after some errors, says less
                self._ranks.end(gently=False)
        if cause is not None and cause is not error:
            raise cause from None


@contextmanager
def _share_of_threads(config: Config) -> Iterator[None]:
    """Leaves the other ranks their share of the CPU's threads; the caller has all again after."""
    num_threads = torch.get_num_threads()
    if config.torch_device.type != "cpu" or num_threads == 1:
        yield
        return
    torch.set_num_threads(max(num_threads // config.tensor_parallel_size, 1))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class _Ranks:
    """All ranks and the order of their end.

    The executor's finalizer needs them when the executor itself has gone.
    """

    def __init__(self) -> None:
        self.runner: ModelRunner | None = None
        self.workers = Workers()

    def end(self, gently: bool = True) -> None:
        """Ends every part, whatever the others raise. A second call does nothing."""
        runner, self.runner = self.runner, None
        with ExitStack() as last_first:
            last_first.callback(self.workers.close_links)
            if runner is not None:
                last_first.callback(runner.exit)  # a step in flight ends with the workers, at last
            last_first.callback(self.workers.end, gently)
            if runner is not None and gently:
                runner.drop_graphs()  # NCCL, which ends with the workers, waits for them


class _ParallelStep:
    """A step on all ranks. That it has failed may show only when its ids are read."""

    def __init__(self, handle: StepHandle, fail: Callable[[BaseException], None]) -> None:
        self._handle = handle
        self._fail = fail

    def token_ids(self) -> list[int]:
        try:
            return self._handle.token_ids()
        except BaseException as error:
            self._fail(error)
            raise

    def logprobs(self) -> StepLogprobs:
        return self._handle.logprobs()


def _shown(error: BaseException) -> str:
    """Returns the first line of an error; kept itself, it would keep the model alive."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _check(config: Config) -> None:
    """Refuses what cannot work before any process is started."""
    if config.torch_device.type == "cuda" and not has_nccl():
        raise RuntimeError(
            "tensor_parallel_size > 1 on GPUs needs NCCL, which this build of torch does not have; "
            "use one GPU, or device='cpu'"
        )
    if not has_gloo():
        raise RuntimeError(
            "tensor_parallel_size > 1 needs torch.distributed with Gloo, which this build of torch "
            "does not have; use one rank"
        )
