"""Provides fixtures, and spreads the tests over processes that share the GPU.

Torch computes with one thread per process, because two spinning threads are very slow on two cores.
"""

import dataclasses
import importlib.util
import multiprocessing.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # runs the kernels on CPU tensors

from nanovllm.config import Config
from nanovllm.utils import peer_memory
from tests.helpers.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.helpers.gpu_turns import GPUTurns
from tests.helpers.interpreter import patch_once
from tests.helpers.warm_processes import WarmProcesses

MAX_WORKERS = 8
GPU_BYTES_OF_WORKER = 6 * 2**30  # covers its context, kernels and small engines, with some to spare
MAX_POOL_TOKENS = 2**16  # of an engine on a GPU whose test does not size the pool

# A background job starts with SIGINT ignored, but the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spreads a run of whole folders over processes if pytest-xdist is installed and no option
    rules that out."""
    option = config.option
    is_worker = hasattr(config, "workerinput")
    if is_worker or getattr(option, "numprocesses", 0) is not None:
        return  # pytest-xdist is not installed, or `-n` is given
    # Single files start sooner in one process.
    has_folders = any(Path(arg).is_dir() for arg in config.args)
    wants_terminal = option.usepdb or option.capture == "no"
    if has_folders and not (wants_terminal or option.keyword or option.collectonly):
        option.numprocesses = num_workers()
        option.dist = "loadfile"


def num_workers() -> int:
    """Returns how many processes to spread the tests over, or 0 if only one fits.

    Each process gets two cores, because some tests run several ranks. On two cores, two processes
    are still a quarter faster than one.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    num = min(max((num_cores or 1) // 2, 2), num_cores or 1, MAX_WORKERS)
    if torch.cuda.is_available():
        num = min(num, torch.cuda.get_device_properties(0).total_memory // GPU_BYTES_OF_WORKER)
    return num if num > 1 else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps the tests of a file, which share fixtures, in one process.

    The tests of kernels and those that start scripts share no fixtures, so any idle process runs
    them.
    """
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shares_nothing = "/kernels/" in nodeid or "test_parallel_script" in nodeid
            return nodeid if shares_nothing else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        config.pluginmanager.register(GPUTurns())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, need in (("gpu", 1), ("gpu2", 2)):
            if marker in item.keywords and num_gpus < need:
                item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA GPU(s)"))


@pytest.fixture(scope="session", autouse=True)
def warm_processes() -> Iterator[None]:
    """Lets processes begin with all that they import, except beside a GPU: there they begin as
    users start them."""
    if sys.platform != "linux" or torch.cuda.is_available():
        yield
        return
    processes = WarmProcesses()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", processes.start)
        yield
    processes.end()


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
            patch_once(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_pools() -> Iterator[None]:
    """Gives an engine on a GPU a small K/V pool unless the test sets the number of blocks or the
    share of memory: by default the engine would take nine tenths of a GPU that other processes use
    too."""
    from_kwargs = Config.from_kwargs

    def with_small_pool(model: str, **kwargs: Any) -> Config:
        config = from_kwargs(model, **kwargs)
        is_sized = "num_kvcache_blocks" in kwargs or "gpu_memory_utilization" in kwargs
        if config.torch_device.type == "cpu" or is_sized:
            return config
        most = MAX_POOL_TOKENS // config.kvcache_block_size
        need = config.max_blocks_per_seq
        num_blocks = max(min(config.max_num_seqs * need, most), need)
        return dataclasses.replace(config, num_kvcache_blocks=num_blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "from_kwargs", with_small_pool)
        yield


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tied fp32 Qwen3 checkpoint with a vocabulary of 512 ids and a tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="session")
def ragged_prompts() -> list[list[int]]:
    """Returns 32 prompts of 1 to 90 ids, 8 of which share a prefix of 40."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 90))] for _ in range(24)]
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(40)]
    return prompts + [shared + prompt[:20] for prompt in prompts[:8]]


@pytest.fixture
def no_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rank 0 find no direct links, as on GPUs without NVLink: then no rank uses peer memory,
    and the CUDA graphs contain NCCL's collectives."""
    monkeypatch.setattr(peer_memory, "_has_direct_links", lambda *_: False)
