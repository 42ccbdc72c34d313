"""Fixtures. One thread per process: two spinning threads on two cores collapse."""

import os
import random
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors

from nanovllm.utils import peer_memory
from tests.helpers.checkpoints import VOCAB_SIZE, make_checkpoint

# A background job starts with Ctrl-C ignored; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, need in (("gpu", 1), ("gpu2", 2)):
            if marker in item.keywords and num_gpus < need:
                item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA GPU(s)"))


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
