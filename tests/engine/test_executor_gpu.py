"""Tests that two ranks on two GPUs that die, fail or exit do so in time, with a clear error, and
free all their memory."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine import workers
from nanovllm.engine.workers import RankDiedError
from nanovllm.utils import gpu_links
from tests.helpers import ROOT
from tests.helpers.engines import NUM_TOKENS, Ids, greedy_ids, make_llm
from tests.helpers.faults import SOON, StepError, at_call, fail, takes_less_than
from tests.helpers.ranks import (
    LONG,
    LONG_SIZES,
    ids_of_one_rank,
    mixed_ids,
    parts,
    worker_processes,
)

pytestmark = [pytest.mark.gpu2, pytest.mark.alone]

MIB = 2**20


def make_pair(checkpoint: Path, **config: Any) -> LLM:
    sizes = LONG_SIZES | {"device": "cuda", "tensor_parallel_size": 2}
    return make_llm(checkpoint, **(sizes | config))


def free_bytes() -> list[int]:
    gc.collect()
    free = []
    for device in range(2):
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
    return free


@pytest.mark.usefixtures("no_peer_memory")
def test_end_without_exit_does_not_wait_for_nccl(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends once the graphs that contain it are gone. If the engine waited for it instead,
    deleting it would take as long as the patched time limit."""
    monkeypatch.setattr(workers, "EXIT_SECONDS", 2 * SOON)
    monkeypatch.setattr(gpu_links, "CLOSE_SECONDS", 2 * SOON)
    frees = []
    for _ in range(2):  # the first engine loads libraries that stay in memory
        llm = make_pair(tiny_qwen3)
        greedy_ids(llm, LONG, NUM_TOKENS)
        with takes_less_than(SOON):
            del llm
        frees.append(free_bytes())
    print(f"free afterwards {frees}")
    assert all(a - b <= 128 * MIB for a, b in zip(*frees, strict=True))


ENDS_WITHOUT_EXIT = """
import atexit, sys, time
atexit.register(lambda: print(time.monotonic() - start))  # runs after what is registered later
from nanovllm import LLM, SamplingParams
from nanovllm.engine import workers
from nanovllm.utils import gpu_links, peer_memory
workers.EXIT_SECONDS = gpu_links.CLOSE_SECONDS = float(sys.argv[2])
peer_memory._has_direct_links = lambda *_: False
sizes = {"max_model_len": 64, "num_kvcache_blocks": 64, "max_num_seqs": 16}
llm = LLM(sys.argv[1], device="cuda", tensor_parallel_size=2, **sizes)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8), use_tqdm=False)
start = time.monotonic()
"""


def test_script_without_exit_does_not_wait_for_nccl(tiny_qwen3: Path) -> None:
    command = [sys.executable, "-c", ENDS_WITHOUT_EXIT, str(tiny_qwen3), str(2 * SOON)]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(f"ended within {script.stdout}s; {script.stderr}")
    assert script.returncode == 0
    assert float(script.stdout) < SOON


def kill_in_step(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills the worker just before the `number`-th step from now."""
    step, calls, pid = llm._step, list[int](), parts(llm)[1][0].process.pid

    def killing_step() -> object:
        calls.append(1)
        if len(calls) == number:
            os.kill(pid or 0, signal.SIGKILL)
        return step()

    monkeypatch.setattr(llm, "_step", killing_step)


def check_killed(llm: LLM, before: list[int]) -> None:
    """Checks that generating fails in time and leaves no process and no GPU memory behind."""
    killed = pytest.raises(RankDiedError, match=r"rank 1 ended with exit code -9")
    with takes_less_than(SOON), killed:
        greedy_ids(llm, LONG, 100)
    assert parts(llm) == (None, [])
    llm.exit()
    assert not worker_processes()
    after = free_bytes()
    print(f"free before {before}, after {after}")
    assert all(b - a <= 512 * MIB for b, a in zip(before, after, strict=True))


def test_worker_killed_in_decode_and_a_new_engine(
    tiny_qwen3: Path,
    ragged_prompts: list[Ids],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = ids_of_one_rank(tiny_qwen3, ragged_prompts, device="cuda")
    before = free_bytes()
    llm = make_pair(tiny_qwen3)
    kill_in_step(llm, 6, monkeypatch)
    check_killed(llm, before)
    with make_pair(tiny_qwen3) as another:
        assert mixed_ids(another, ragged_prompts) == expected


@pytest.mark.parametrize("has_peer_memory", [True, False], ids=["peer memory", "NCCL"])
def test_worker_killed_in_prefill(
    has_peer_memory: bool, tiny_qwen3: Path, request: pytest.FixtureRequest
) -> None:
    """The worker dies just before rank 0 launches the prefill, so rank 0 waits for it in an
    all-reduce."""
    if not has_peer_memory:
        request.getfixturevalue("no_peer_memory")
    before = free_bytes()
    llm = make_pair(tiny_qwen3)
    pid = parts(llm)[1][0].process.pid
    at_call(parts(llm)[0].model, 1, lambda: os.kill(pid or 0, signal.SIGKILL))
    check_killed(llm, before)


@pytest.mark.usefixtures("no_peer_memory")
def test_worker_killed_with_nccl_in_the_graphs(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = free_bytes()
    llm = make_pair(tiny_qwen3)
    kill_in_step(llm, 6, monkeypatch)
    check_killed(llm, before)


def test_rank_0_fails_in_a_step(tiny_qwen3: Path) -> None:
    llm = make_pair(tiny_qwen3)
    at_call(parts(llm)[0].model.model.layers[1], 1, fail)
    with takes_less_than(SOON), pytest.raises(StepError):
        greedy_ids(llm, LONG, NUM_TOKENS)
    with pytest.raises(RankDiedError, match="make a new LLM"):
        greedy_ids(llm, LONG, NUM_TOKENS)


def test_the_fullest_gpu_counts_and_exit_gives_everything_back(tiny_qwen3: Path) -> None:
    config = {"gpu_memory_utilization": 0.1, "num_kvcache_blocks": -1, "kvcache_block_size": 256}
    frees, num_blocks = [], []
    for left in (1.0, 0.05):  # the fraction of the second GPU that is left free
        free, total = torch.cuda.mem_get_info(1)
        num_bytes = max(int(free - left * total), 0)
        ballast = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
        with make_pair(tiny_qwen3, **config) as llm:
            num_blocks.append(llm.scheduler.block_manager.num_blocks)
            greedy_ids(llm, LONG, NUM_TOKENS)
        del ballast
        frees.append(free_bytes())
    print(f"{num_blocks} blocks, free afterwards {frees}")
    assert num_blocks[1] < 0.7 * num_blocks[0]
    assert all(abs(a - b) <= 256 * MIB for a, b in zip(*frees, strict=True))
