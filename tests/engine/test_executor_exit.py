"""Tests the order in which an executor ends its parts, also if ending one of them raises."""

from pathlib import Path

import pytest

from nanovllm.config import Config
from nanovllm.engine import executor
from nanovllm.engine.batch import DecodePart, ScheduledBatch
from nanovllm.engine.executor import TensorParallelExecutor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.workers import RankDiedError
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_links import PeerLostError

PARTS = ["workers", "runner", "links"]
GENTLY = ["graphs", *PARTS]


class Ends:
    """Stands in for workers, runner and links, and records the order in which they are ended.
    Ending one of them may raise."""

    num_blocks = 1
    reads_prefixes_once = False
    description = "no model"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.failing: dict[str, BaseException] = {}
        self.cause: RankDiedError | None = None

    def start(self, _: Config) -> TPGroup:
        return TPGroup()

    def send(self, *_: object) -> None:
        pass

    def launch(self, _: object) -> None:
        raise self.failing["launch"]

    def wait_for_cause(self) -> RankDiedError | None:
        return self.cause

    def end(self, gently: bool = True) -> None:
        self._note("workers")

    def drop_graphs(self) -> None:
        self._note("graphs")

    def exit(self) -> None:
        self._note("runner")

    def close_links(self) -> None:
        self._note("links")

    def _note(self, part: str) -> None:
        self.log.append(part)
        if part in self.failing:
            raise self.failing.pop(part)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    ends = Ends()
    monkeypatch.setattr(executor, "Workers", lambda: ends)
    monkeypatch.setattr(executor, "ModelRunner", lambda *_: ends)
    return ends


@pytest.fixture
def parallel(tiny_qwen3: Path, ends: Ends) -> TensorParallelExecutor:
    return TensorParallelExecutor(Config(str(tiny_qwen3), device="cpu", tensor_parallel_size=2))


def test_graphs_end_before_the_workers_then_the_runner_then_the_links(
    tiny_qwen3: Path, ends: Ends
) -> None:
    """In this order NCCL does not wait for graphs, nor the runner for a peer. It is the same if the
    executor is deleted without exit()."""
    config = Config(str(tiny_qwen3), device="cpu", tensor_parallel_size=2)
    parallel = TensorParallelExecutor(config)
    del parallel
    assert ends.log == GENTLY
    parallel = TensorParallelExecutor(config)
    for _ in range(2):
        parallel.exit()
    assert ends.log == GENTLY + GENTLY + ["workers", "links"]


@pytest.mark.parametrize("part", GENTLY)
@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyboardInterrupt()])
def test_exit_goes_on_whatever_a_part_of_it_raises(
    part: str, error: BaseException, parallel: TensorParallelExecutor, ends: Ends
) -> None:
    ends.failing[part] = error
    with pytest.raises(type(error)):
        parallel.exit()
    assert ends.log == GENTLY


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("is_caused", [False, True])
def test_a_failed_step_is_what_the_user_sees(
    part: str, is_caused: bool, parallel: TensorParallelExecutor, ends: Ends
) -> None:
    error = PeerLostError() if is_caused else ArithmeticError()
    ends.cause = RankDiedError() if is_caused else None
    ends.failing = {"launch": error, part: RuntimeError("CUDA error")}
    with pytest.raises(RankDiedError if is_caused else ArithmeticError):
        parallel.launch(ScheduledBatch(DecodePart([], [], [], 1)))
    assert ends.log == PARTS


def test_a_runner_holds_nothing_after_an_error_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(_: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    runner = ModelRunner.__new__(ModelRunner)
    vars(runner).update(_stream=object(), device=None, model=object())
    with pytest.raises(RuntimeError, match="CUDA error"):
        runner.exit()
    assert not vars(runner)
    runner.exit()
