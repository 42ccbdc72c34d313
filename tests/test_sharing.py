"""Tests that test processes leave each other room on the GPU, as conftest.py arranges."""

import time
from pathlib import Path
from threading import Thread

import pytest
import torch

from nanovllm.config import Config
from tests.helpers.faults import SOON, until
from tests.helpers.gpu_turns import Turns

fcntl = pytest.importorskip("fcntl")


def is_locked(path: str) -> bool:
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_is_to_be_alone_waits_for_all_and_is_not_overtaken(tmp_path: Path) -> None:
    path, order = str(tmp_path / "lock"), list[str]()
    first, second, lonely, late = (Turns(path) for _ in range(4))

    def take(turns: Turns, name: str, alone: bool = False) -> None:
        turns.take(alone=alone)
        order.append(name)

    for turns, name in ((first, "first"), (second, "second"), (second, "again")):
        take(turns, name)
    lonely_thread = Thread(target=take, args=(lonely, "alone", True), daemon=True)
    lonely_thread.start()
    until(lambda: is_locked(f"{path}.turnstile"), SOON)
    late_thread = Thread(target=take, args=(late, "late"), daemon=True)
    late_thread.start()
    for turns in (first, second):
        time.sleep(0.2)
        assert order == ["first", "second", "again"]
        turns.release()
    lonely_thread.join(SOON)
    time.sleep(0.2)
    assert order == ["first", "second", "again", "alone"]
    lonely.take(alone=True)  # returns at once, because it still holds the lock
    lonely.release()
    late_thread.join(SOON)
    assert order[-1] == "late"
    late.release()


def test_engines_on_a_gpu_take_little_unless_the_test_says_how_much(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    model = str(tiny_qwen3)
    assert Config.from_kwargs(model).num_kvcache_blocks == 2**16 // 256
    assert Config.from_kwargs(model, max_num_seqs=3).num_kvcache_blocks == 3 * 1024 // 256
    assert Config.from_kwargs(model, num_kvcache_blocks=9).num_kvcache_blocks == 9
    assert Config.from_kwargs(model, num_kvcache_blocks=-1).num_kvcache_blocks == -1
    assert Config.from_kwargs(model, gpu_memory_utilization=0.5).num_kvcache_blocks == -1
    assert Config.from_kwargs(model, device="cpu").num_kvcache_blocks == -1
