"""Fuzzes the engine's interface: whatever happens, each completion is what its request gives alone.

NANOVLLM_FUZZ_MINUTES=60 pytest -n 0 -s tests/llm/test_fuzz.py goes on for an hour with new seeds.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_llm
from tests.helpers.fuzz import FuzzedEngine, random_config
from tests.helpers.fuzz_requests import MAX_LEN, Alone, RandomRequests

MINUTES = float(os.environ.get("NANOVLLM_FUZZ_MINUTES", 0))
NUM_ENGINES, NUM_ACTIONS, NUM_REQUESTS = 8, 100, 80


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns two sets of weights of one model, of a single layer for the sake of speed."""
    paths = [tmp_path_factory.mktemp(f"weights{seed}") for seed in range(2)]
    return [make_checkpoint(p, seed=i, num_hidden_layers=1) for i, p in enumerate(paths)]


@pytest.fixture
def alone(checkpoints: list[Path]) -> list[Alone]:
    config = {"max_model_len": MAX_LEN, "enable_prefix_caching": False, "async_scheduling": False}
    return [Alone(make_llm(checkpoint, **config)) for checkpoint in checkpoints]


def fuzz(
    seed: int,
    checkpoints: list[Path],
    alone: list[Alone],
    requests: RandomRequests,
    num_actions: int,
    **config: Any,
) -> FuzzedEngine:
    rng = random.Random(seed)
    config = random_config(rng) | config
    fails = "tensor_parallel_size" not in config  # several ranks do not survive a step that fails
    engine = FuzzedEngine(rng, checkpoints, alone, requests, config, fails=fails)
    try:
        for _ in range(num_actions):
            engine.act()
        engine.finish()
    except BaseException:
        print(f"seed {seed}, {config}, {dict(engine.done)}")
        engine.llm.exit()
        raise
    return engine


def test_random_actions(checkpoints: list[Path], alone: list[Alone]) -> None:
    done: Counter[str] = Counter()
    num_checked = 0
    requests = RandomRequests(0, NUM_REQUESTS)
    for seed in range(NUM_ENGINES):
        engine = fuzz(seed, checkpoints, alone, requests, NUM_ACTIONS)
        done += engine.done
        num_checked += engine.num_checked
    print(f"{num_checked} completions compared")
    assert num_checked > 500
    assert sum(count for name, count in done.items() if name.startswith("fault")) > 10
    assert min(done.values()) > 0


def test_random_actions_on_two_ranks(checkpoints: list[Path], alone: list[Alone]) -> None:
    requests = RandomRequests(0, 20)
    engine = fuzz(0, checkpoints, alone, requests, 40, tensor_parallel_size=2)
    assert engine.num_checked > 50


@pytest.mark.skipif(not MINUTES, reason="goes on for NANOVLLM_FUZZ_MINUTES")
@pytest.mark.timeout(0)
def test_random_actions_for_long(checkpoints: list[Path], alone: list[Alone]) -> None:
    end = time.monotonic() + 60 * MINUTES
    seed, num_checked, num_actions = 10 * random.randrange(10**6, 10**8), 0, 0
    while time.monotonic() < end:
        config = {"tensor_parallel_size": 2} if seed % 10 == 0 else {}
        if seed % 10 == 0:
            requests = RandomRequests(seed, 1000)
        engine = fuzz(seed, checkpoints, alone, requests, 300, **config)
        num_checked += engine.num_checked
        num_actions += engine.done.total()
        seed += 1
        print(f"{num_actions} actions, {num_checked} completions compared", flush=True)
