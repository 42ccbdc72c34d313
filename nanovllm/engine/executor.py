"""Tensor parallelism on one host: rank 0 here, ranks 1 to N-1 in processes of their own.

Every rank gets the same scheduled batches in the same order and keeps the same row state; ids are
read on rank 0 alone. A step that fails on any rank ends the engine: the ranks could not be brought
into step again.
"""

import pickle
from collections.abc import Callable
from multiprocessing import current_process
from multiprocessing.util import Finalize

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch, StepHandle
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.workers import RankDiedError, Workers
from nanovllm.models import model_class
from nanovllm.utils.distributed import PeerLostError, TPGroup, has_nccl


class TensorParallelExecutor:
    """Runs batches on `config.tensor_parallel_size` ranks; interchangeable with a `ModelRunner`."""

    def __init__(self, config: Config) -> None:
        _check(config)
        self._runner: ModelRunner | None = None
        self._workers = Workers()
        # At the interpreter's end it runs before multiprocessing joins what is left, unlike
        # weakref.finalize; in a forked child never.
        self._finalizer = Finalize(self, self._workers.finish, exitpriority=0)
        try:
            self._runner = ModelRunner(config.on_rank(0), self._workers.start(config))
        except BaseException as error:
            self._fail(error)
            raise
        self.num_blocks = self._runner.num_blocks

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        if self._runner is None:
            raise RankDiedError("a step has failed on one of the ranks; make a new LLM")
        try:
            self._workers.send(pickle.dumps(batch))
            return _ParallelStep(self._runner.launch(batch), self._fail)
        except BaseException as error:
            self._fail(error)
            raise

    def exit(self) -> None:
        """Ends all ranks and frees everything. Idempotent."""
        self._workers.end()
        self._drop_runner()  # not before: a step in flight ends with the workers, at the latest
        self._workers.close_links()

    def _fail(self, error: BaseException) -> None:
        """Ends all ranks; if another rank's end is behind `error`, raises that instead."""
        cause = None
        try:
            if isinstance(error, PeerLostError | RankDiedError):
                cause = self._workers.wait_for_cause()
        finally:
            self._workers.end(gently=False)
            self._drop_runner()  # not before: it waits for its last collective, which now fails
            self._workers.close_links()  # not before: NCCL waits for the graphs that hold it
        if cause is not None and cause is not error:
            raise cause from None

    def _drop_runner(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.exit()


class _ParallelStep:
    """A step on all ranks: that it fails may show only when its ids are read."""

    def __init__(self, handle: StepHandle, fail: Callable[[BaseException], None]) -> None:
        self._handle = handle
        self._fail = fail

    def token_ids(self) -> list[int]:
        try:
            return self._handle.token_ids()
        except BaseException as error:
            self._fail(error)
            raise


def _check(config: Config) -> None:
    """Refuses before any process is started what cannot work."""
    if getattr(current_process(), "_inheriting", False):
        raise RuntimeError(
            "tensor_parallel_size > 1 starts processes that import your script again; put its "
            'main part under `if __name__ == "__main__":`'
        )
    if config.torch_device.type == "cuda" and not has_nccl():
        raise RuntimeError(
            "tensor_parallel_size > 1 on GPUs needs NCCL, which this build of torch does not have; "
            "use one GPU, or device='cpu'"
        )
    with torch.device("meta"):  # shapes alone
        group = TPGroup(0, config.tensor_parallel_size)
        model_class(config.hf_config)(config.hf_config, group, tie_word_embeddings=True)
