"""Tests the knobs whose defaults depend on the device. Bad values are in llm/test_errors.py."""

from pathlib import Path

import pytest
import torch

from nanovllm.config import Config


@pytest.mark.parametrize(
    ("device", "budget", "is_async"), [("cpu", 1024, False), ("cuda", 16384, True)]
)
def test_a_cpu_has_short_steps_and_waits_for_each(
    device: str, budget: int, is_async: bool, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C waits for a step's end; and to launch a step ahead brings a CPU nothing, but computes
    a token too many for each request that stops."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    config = Config(str(tiny_qwen3))
    assert config.torch_device.type == device
    assert (config.max_num_batched_tokens, config.async_scheduling) == (budget, is_async)
    own = Config(str(tiny_qwen3), max_num_batched_tokens=99, async_scheduling=not is_async)
    assert (own.max_num_batched_tokens, own.async_scheduling) == (99, not is_async)
