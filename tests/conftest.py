"""Fixtures, and who runs what when: tests are spread over processes, which share the GPU.

One thread per process: two spinning threads on two cores collapse.
"""

import dataclasses
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors

from nanovllm.config import Config
from nanovllm.utils import peer_memory
from tests.helpers.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.helpers.gpu_turns import GPUTurns

MAX_WORKERS = 8
GPU_BYTES_OF_WORKER = 6 * 2**30  # its context, kernels and small engines, with room
MAX_POOL_TOKENS = 2**16  # by default, of an engine on a GPU that other processes use, too

# A background job starts with Ctrl-C ignored; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spreads the suite over processes if pytest-xdist is there and nothing speaks against it."""
    option = config.option
    is_worker = hasattr(config, "workerinput")
    if is_worker or getattr(option, "numprocesses", 0) is not None:
        return  # or there is no pytest-xdist, or `-n` is given
    has_folders = any(Path(arg).is_dir() for arg in config.args)  # single files begin sooner so
    wants_terminal = option.usepdb or option.capture == "no"
    if has_folders and not (wants_terminal or option.keyword or option.collectonly):
        option.numprocesses = num_workers()
        option.dist = "loadfile"


def num_workers() -> int:
    """Two cores for a process, as some tests have several ranks; two processes on two cores still
    gain a fourth. 0 where one process is all that fits."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    num = min(max((num_cores or 1) // 2, 2), num_cores or 1, MAX_WORKERS)
    if torch.cuda.is_available():
        num = min(num, torch.cuda.get_device_properties(0).total_memory // GPU_BYTES_OF_WORKER)
    return num if num > 1 else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps a file's tests, which share its fixtures, in one process.

    Tests of kernels and those that start scripts share nothing; they go to whoever is free.
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
def small_pools() -> Iterator[None]:
    """Gives engines on a GPU that name neither blocks nor a share a pool for few requests: left to
    themselves they take nine tenths of a GPU that other processes use, too."""
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
    """A tied fp32 Qwen3 of 512 ids with a tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="session")
def ragged_prompts() -> list[list[int]]:
    """32 prompts of 1 to 90 ids, some sharing a prefix of 40."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 90))] for _ in range(24)]
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(40)]
    return prompts + [shared + prompt[:20] for prompt in prompts[:8]]


@pytest.fixture
def no_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs without NVLink: if rank 0 cannot, none does. NCCL is in the graphs then."""
    monkeypatch.setattr(peer_memory, "_has_direct_links", lambda *_: False)
