"""Tests that ranks that die, fail or hang cause a clear error in time and leave nothing behind."""

import copy
import gc
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine import executor, workers
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.ipc import NUM_SLOTS
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.staging import FetchedIds
from nanovllm.engine.workers import RankDiedError, Worker, Workers
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_links import PeerLostError
from tests.helpers.engines import NUM_TOKENS, greedy_ids, make_llm
from tests.helpers.faults import SOON, STARTING, StepError, at_call, fail, takes_less_than
from tests.helpers.ranks import parallel, parts, worker_processes

PROMPTS = [[5, 300, 17], [222, 80, 9, 411]]
SIZES = {"max_model_len": 64, "num_kvcache_blocks": 32}


def make_ranks(checkpoint: Path, size: int = 2) -> LLM:
    return make_llm(checkpoint, tensor_parallel_size=size, **SIZES)


def kill(worker: Worker, signum: int = signal.SIGKILL) -> None:
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signum)


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path) -> list[list[int]]:
    return greedy_ids(make_ranks(tiny_qwen3, 1), PROMPTS, NUM_TOKENS)


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks after each test that no worker and no temporary directory is left. Shared memory has
    no name, so it cannot be left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    gc.collect()
    assert not list(tmp_path.glob("nanovllm-*"))
    assert not worker_processes()


def check_dead(llm: LLM) -> None:
    """Checks that the next use of the engine raises the error at once and that it holds nothing."""
    with takes_less_than(SOON), pytest.raises(RankDiedError, match="make a new LLM"):
        greedy_ids(llm, PROMPTS, NUM_TOKENS)
    assert parts(llm) == (None, [])
    for _ in range(2):
        llm.exit()


def test_worker_killed_in_a_step_and_a_new_engine(
    tiny_qwen3: Path, expected: list[list[int]]
) -> None:
    llm = make_ranks(tiny_qwen3)
    runner, (worker,) = parts(llm)
    at_call(runner.model, 5, lambda: kill(worker))
    killed = pytest.raises(RankDiedError, match=r"rank 1 ended with exit code -9")
    with takes_less_than(SOON), killed:
        greedy_ids(llm, PROMPTS, NUM_TOKENS)
    with make_ranks(tiny_qwen3) as another:
        assert greedy_ids(another, PROMPTS, NUM_TOKENS) == expected
    check_dead(llm)


def test_failure_that_shows_when_ids_are_read(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure shows when the ids are read, as on GPUs, where a launch does not wait for its
    peers."""
    llm = make_ranks(tiny_qwen3)
    (worker,) = parts(llm)[1]

    def token_ids(_: FetchedIds) -> list[int]:
        kill(worker)
        raise PeerLostError

    monkeypatch.setattr(FetchedIds, "token_ids", token_ids)
    with pytest.raises(RankDiedError, match=r"rank 1 ended with exit code -9"):
        greedy_ids(llm, PROMPTS, NUM_TOKENS)
    check_dead(llm)


def test_worker_killed_while_idle(tiny_qwen3: Path, tmp_path: Path) -> None:
    llm = make_ranks(tiny_qwen3)
    assert not list(tmp_path.iterdir()), "all ranks could be killed now"
    kill(parts(llm)[1][0], signal.SIGTERM)
    time.sleep(0.2)
    with pytest.raises(RankDiedError, match=r"rank 1 ended with exit code -15"):
        greedy_ids(llm, PROMPTS, NUM_TOKENS)
    check_dead(llm)


@pytest.mark.parametrize("victims", [[3], [2, 3]])
def test_the_rank_that_died_first_is_named(victims: list[int], tiny_qwen3: Path) -> None:
    """The other ranks end too, because they have lost a peer, but the error does not name them."""
    llm = make_ranks(tiny_qwen3, 4)
    runner, others = parts(llm)
    at_call(runner.model, 3, lambda: [kill(others[rank - 1]) for rank in victims])
    with pytest.raises(RankDiedError, match=rf"rank {victims} ended with exit code -9"):
        greedy_ids(llm, PROMPTS, NUM_TOKENS)
    check_dead(llm)


def test_worker_that_raises(tiny_qwen3: Path) -> None:
    llm = make_ranks(tiny_qwen3)
    parallel(llm)._ranks.workers.send("launch", "no batch")
    with pytest.raises(RankDiedError, match=r"(?s)rank 1 .* code 1: it raised\nTrace.*Attribute"):
        greedy_ids(llm, PROMPTS, NUM_TOKENS)
    check_dead(llm)


def test_worker_killed_between_hello_and_meeting(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed worker never connects, so rank 0's wait for it has to notice its end."""
    connect = Workers._connect

    def kill_first(self: Workers, config: Config, store_file: str) -> TPGroup:
        kill(self._workers[0])
        return connect(self, config, f"{store_file}-of-nobody")

    monkeypatch.setattr(Workers, "_connect", kill_first)
    killed = pytest.raises(RankDiedError, match=r"rank 1 ended with exit code -9")
    with takes_less_than(STARTING), killed:
        make_ranks(tiny_qwen3)


def test_worker_that_cannot_load(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the worker fails to load: it reads a broken copy of the checkpoint, rank 0 the intact
    one."""
    broken = Path(shutil.copytree(tiny_qwen3, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    start = Workers.start

    def start_elsewhere(self: Workers, config: Config) -> TPGroup:
        config = copy.copy(config)
        config.model = str(broken)
        return start(self, config)

    monkeypatch.setattr(Workers, "start", start_elsewhere)
    with pytest.raises(RankDiedError, match=r"rank 1 ended with exit code 1: it raised") as error:
        make_ranks(tiny_qwen3)
    for part in ("Traceback", "worker_process.py", "is not a complete safetensors file"):
        assert part in str(error.value)


def test_rank_0_fails_in_a_step(tiny_qwen3: Path) -> None:
    llm = make_ranks(tiny_qwen3)
    at_call(parts(llm)[0].model.model.layers[1], 3, fail)
    with takes_less_than(SOON), pytest.raises(StepError):
        greedy_ids(llm, PROMPTS, NUM_TOKENS)
    check_dead(llm)


def test_rank_0_fails_to_load(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "ModelRunner", lambda *_: fail())
    with pytest.raises(StepError):
        make_ranks(tiny_qwen3)


def test_exit_with_a_worker_that_is_stopped(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine exits in time even if the ring is full of messages that the worker has not
    read."""
    monkeypatch.setattr(workers, "EXIT_SECONDS", 2.0)
    llm = make_ranks(tiny_qwen3)
    kill(parts(llm)[1][0], signal.SIGSTOP)
    for _ in range(NUM_SLOTS):
        parallel(llm)._ranks.workers.send("launch", "unread")
    with takes_less_than(SOON):
        llm.exit()


def test_engine_without_references_ends_even_in_another_ones_step(
    tiny_qwen3: Path, expected: list[list[int]]
) -> None:
    llm, other = (make_ranks(tiny_qwen3) for _ in range(2))
    worker, others_worker = (psutil.Process(parts(x)[1][0].process.pid) for x in (llm, other))
    other.itself = other  # type: ignore[attr-defined]
    del other
    assert others_worker.is_running()
    at_call(parts(llm)[0].model.model.layers[0], 2, gc.collect)
    assert greedy_ids(llm, PROMPTS, NUM_TOKENS) == expected
    assert not others_worker.is_running()
    assert worker.is_running()
    llm.add_request(PROMPTS[0], SamplingParams())
    llm.step()  # leaves a step in flight
    del llm
    assert not worker.is_running()


def test_rank_0_leaves_the_other_ranks_their_share_of_the_threads(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous, seen = torch.get_num_threads(), []
    launch = ModelRunner.launch

    def spy(runner: ModelRunner, batch: ScheduledBatch) -> FetchedIds:
        seen.append(torch.get_num_threads())
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "launch", spy)
    torch.set_num_threads(5)
    try:
        greedy_ids(make_ranks(tiny_qwen3), PROMPTS, 3)
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(previous)
    assert set(seen) == {2}
