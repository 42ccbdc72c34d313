"""Two ranks on two GPUs: the ids of one, whatever a rank's end leaves behind, and memory."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nanovllm import LLM
from nanovllm.engine.workers import RankDiedError
from nanovllm.utils import peer_memory
from tests.checkpoints import make_checkpoint
from tests.test_executor import StepError, at_call, fail, parts
from tests.test_tensor_parallel import (
    MODELS,
    NUM_TOKENS,
    Prompts,
    capture_logits,
    greedy_ids,
    ids,
    mixed_params,
)

pytestmark = pytest.mark.gpu2

ROOT = Path(__file__).parents[1]
MIB = 2**20
LONG = [[token % 500 for token in range(i, i + 900)] for i in range(8)]  # prefilled by way of NCCL


def make_llm(checkpoint: Path, size: int, **config: Any) -> LLM:
    sizes = {"max_model_len": 1024, "kvcache_block_size": 16, "num_kvcache_blocks": 2048}
    defaults = sizes | {"max_num_seqs": 32, "device": "cuda", "tensor_parallel_size": size}
    return LLM(str(checkpoint), **(defaults | config))


def ids_of_one_gpu(checkpoint: Path, prompts: Prompts) -> Prompts:
    with make_llm(checkpoint, 1, enable_prefix_caching=False, async_scheduling=False) as llm:
        return ids(llm, prompts)


def free_bytes() -> list[int]:
    gc.collect()
    free = []
    for device in range(2):
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
    return free


@pytest.fixture(scope="module")
def pair(tiny_qwen3: Path) -> Iterator[LLM]:
    with make_llm(tiny_qwen3, 2) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, ragged_prompts: Prompts) -> Prompts:
    return ids_of_one_gpu(tiny_qwen3, ragged_prompts)


def test_gpus_share_memory_and_the_process_is_the_users(pair: LLM) -> None:
    assert parts(pair)[0].group.peers is not None, "only then the fused kernels are tested"
    assert torch.cuda.current_device() == 0
    assert not torch.distributed.is_initialized()
    assert not [name for name in os.environ if name.startswith("TORCH_NCCL_")]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("budget", [16384, 64, 7])
def test_chunks_cache_hits_and_waiting_for_each_step(
    pair: LLM,
    budget: int,
    is_async: bool,
    ragged_prompts: Prompts,
    expected: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair.scheduler, "max_num_batched_tokens", budget)
    monkeypatch.setattr(pair.config, "async_scheduling", is_async)
    for _ in range(2):
        assert ids(pair, ragged_prompts) == expected


def test_preemption_without_graphs(tiny_qwen3: Path, ragged_prompts: Prompts) -> None:
    prompts = ragged_prompts[16:]
    expected = ids_of_one_gpu(tiny_qwen3, prompts)
    small = {"kvcache_block_size": 4, "num_kvcache_blocks": 36, "max_model_len": 128}
    with make_llm(tiny_qwen3, 2, enforce_eager=True, **small) as llm:
        for _ in range(2):
            assert ids(llm, prompts) == expected
        assert llm.scheduler.num_preemptions > 5


@pytest.mark.parametrize("name", [name for name, (size, _) in MODELS.items() if size == 2])
def test_models(name: str, tmp_path: Path, ragged_prompts: Prompts) -> None:
    checkpoint = make_checkpoint(tmp_path, with_tokenizer=False, **MODELS[name][1])
    prompts = [[token % 509 for token in prompt] for prompt in ragged_prompts[:12] + LONG]
    expected = ids_of_one_gpu(checkpoint, prompts)
    with make_llm(checkpoint, 2) as llm:
        for _ in range(2):
            assert ids(llm, prompts) == expected


def test_bfloat16(tmp_path: Path, ragged_prompts: Prompts) -> None:
    checkpoint = make_checkpoint(tmp_path, dtype=torch.bfloat16, with_tokenizer=False)
    logits = []
    for size in (1, 2):
        with make_llm(checkpoint, size) as llm:
            captured = capture_logits(llm)
            greedy_ids(llm, ragged_prompts[:8], NUM_TOKENS)
            logits.append(captured[0])
    assert logits[1].shape == (8, 256)
    torch.testing.assert_close(logits[1], logits[0][:, :256], atol=0.15, rtol=0.05)


def test_two_engines_in_turns(pair: LLM, tiny_qwen3: Path, ragged_prompts: Prompts) -> None:
    prompts = ragged_prompts[:8]
    expected = ids_of_one_gpu(tiny_qwen3, prompts)
    with make_llm(tiny_qwen3, 2) as other:
        finished: list[dict[int, list[int]]] = [{}, {}]
        for request in zip(prompts, mixed_params(8), strict=True):
            for llm in (pair, other):
                llm.add_request(*request)
        while not (pair.is_finished() and other.is_finished()):
            for llm, results in zip((pair, other), finished, strict=True):
                results.update(llm.step()[0])
    assert [[ids for _, ids in sorted(results.items())] for results in finished] == [expected] * 2


@pytest.fixture
def no_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs without NVLink: if rank 0 cannot, none does. NCCL is in the graphs then."""
    monkeypatch.setattr(peer_memory, "_can_signal", lambda *_: False)


@pytest.mark.usefixtures("no_peer_memory")
def test_without_peer_memory(tiny_qwen3: Path, ragged_prompts: Prompts, expected: Prompts) -> None:
    with make_llm(tiny_qwen3, 2) as llm:
        assert parts(llm)[0].group.peers is None
        assert ids(llm, ragged_prompts) == expected


@pytest.mark.usefixtures("no_peer_memory")
def test_end_without_exit_does_not_wait_for_nccl(tiny_qwen3: Path) -> None:
    """Which ends once the graphs that hold it have gone."""
    frees = []
    for _ in range(2):  # the first leaves libraries in memory
        llm = make_llm(tiny_qwen3, 2)
        greedy_ids(llm, LONG, NUM_TOKENS)
        start = time.monotonic()
        del llm
        seconds = time.monotonic() - start
        frees.append(free_bytes())
        print(f"ended within {seconds:.2f} s, free afterwards {frees[-1]}")
        assert seconds < 3
    assert all(a - b <= 128 * MIB for a, b in zip(*frees, strict=True))


ENDS_WITHOUT_EXIT = """
import atexit, sys, time
atexit.register(lambda: print(time.monotonic() - start))  # runs after what is registered later
from nanovllm import LLM, SamplingParams
from nanovllm.utils import peer_memory
peer_memory._can_signal = lambda *_: False
sizes = {"max_model_len": 64, "num_kvcache_blocks": 64, "max_num_seqs": 16}
llm = LLM(sys.argv[1], device="cuda", tensor_parallel_size=2, **sizes)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8), use_tqdm=False)
start = time.monotonic()
"""


def test_script_without_exit_does_not_wait_for_nccl(tiny_qwen3: Path) -> None:
    command = [sys.executable, "-c", ENDS_WITHOUT_EXIT, str(tiny_qwen3)]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    print(f"ended within {script.stdout}s; {script.stderr}")
    assert float(script.stdout) < 3


def kill_in_step(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills the worker in front of the `number`-th step from now."""
    step, calls, pid = llm._step, list[int](), parts(llm)[1][0].process.pid

    def killing_step() -> object:
        calls.append(1)
        if len(calls) == number:
            os.kill(pid or 0, signal.SIGKILL)
        return step()

    monkeypatch.setattr(llm, "_step", killing_step)


def check_killed(llm: LLM, before: list[int]) -> None:
    """That generating fails in time, and leaves nothing behind."""
    start = time.monotonic()
    with pytest.raises(RankDiedError, match=r"rank 1 ended with exit code -9"):
        greedy_ids(llm, LONG, 100)
    print(f"noticed within {time.monotonic() - start:.2f} s")
    assert time.monotonic() - start < 10
    assert parts(llm) == (None, [])
    llm.exit()
    children = psutil.Process().children()
    assert not [p for p in children if "spawn_main" in " ".join(p.cmdline())]
    after = free_bytes()
    print(f"free before {before}, after {after}")
    assert all(b - a <= 512 * MIB for b, a in zip(before, after, strict=True))


def test_worker_killed_in_decode_and_a_new_engine(
    tiny_qwen3: Path,
    ragged_prompts: Prompts,
    expected: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = free_bytes()
    llm = make_llm(tiny_qwen3, 2)
    kill_in_step(llm, 6, monkeypatch)
    check_killed(llm, before)
    with make_llm(tiny_qwen3, 2) as another:
        assert ids(another, ragged_prompts) == expected


def test_worker_killed_in_prefill(tiny_qwen3: Path) -> None:
    """Rank 0 is about to launch it, and waits in NCCL then."""
    before = free_bytes()
    llm = make_llm(tiny_qwen3, 2)
    pid = parts(llm)[1][0].process.pid
    at_call(parts(llm)[0].model, 1, lambda: os.kill(pid or 0, signal.SIGKILL))
    check_killed(llm, before)


@pytest.mark.usefixtures("no_peer_memory")
def test_worker_killed_with_nccl_in_the_graphs(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = free_bytes()
    llm = make_llm(tiny_qwen3, 2)
    kill_in_step(llm, 6, monkeypatch)
    check_killed(llm, before)


def test_rank_0_fails_in_a_step(tiny_qwen3: Path) -> None:
    llm = make_llm(tiny_qwen3, 2)
    at_call(parts(llm)[0].model.model.layers[1], 1, fail)
    start = time.monotonic()
    with pytest.raises(StepError):
        greedy_ids(llm, LONG, NUM_TOKENS)
    assert time.monotonic() - start < 10
    with pytest.raises(RankDiedError, match="make a new LLM"):
        greedy_ids(llm, LONG, NUM_TOKENS)


def test_the_fullest_gpu_counts_and_exit_gives_everything_back(tiny_qwen3: Path) -> None:
    config = {"gpu_memory_utilization": 0.1, "num_kvcache_blocks": -1, "kvcache_block_size": 256}
    frees, num_blocks = [], []
    for ballast_share in (0.0, 0.95):
        free, total = torch.cuda.mem_get_info(1)
        num_bytes = int(max(free - (1 - ballast_share) * total, 0)) if ballast_share else 0
        ballast = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
        with make_llm(tiny_qwen3, 2, **config) as llm:
            num_blocks.append(llm.scheduler.block_manager.num_blocks)
            greedy_ids(llm, LONG, NUM_TOKENS)
        del ballast
        frees.append(free_bytes())
    print(f"{num_blocks} blocks, free afterwards {frees}")
    assert num_blocks[1] < 0.7 * num_blocks[0]
    assert all(abs(a - b) <= 256 * MIB for a, b in zip(*frees, strict=True))


def test_fewer_gpus_than_ranks(tiny_qwen3: Path) -> None:
    size = torch.cuda.device_count() + 1
    if size > 8:
        pytest.skip("as many GPUs as ranks can be")
    with pytest.raises(ValueError, match=rf"_size={size}, but torch sees {size - 1} GPUs"):
        make_llm(tiny_qwen3, size)
