"""What ranks on GPUs need that shows without any: their devices, and waits that end."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import executor, staging
from nanovllm.engine.llm_engine import make_runner
from nanovllm.engine.workers import Workers
from nanovllm.utils.distributed import PeerLostError, TPGroup


def test_waiting_for_a_gpu_ends_with_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event passes once nobody waits any more, or never."""
    answers = iter([False, False, True])
    event = SimpleNamespace(query=lambda: next(answers, False))
    links = SimpleNamespace(is_aborted=False)
    group = TPGroup(0, 2, links=links)  # type: ignore[arg-type]
    staging.wait_for(event, group)  # type: ignore[arg-type]
    links.is_aborted, answers = True, iter([False, True])
    with pytest.raises(PeerLostError, match="rank 0 of 2 has lost another"):
        staging.wait_for(event, group)  # type: ignore[arg-type]
    monkeypatch.setattr(staging, "TIMEOUT", timedelta(seconds=0.05))
    with pytest.raises(PeerLostError, match="has not ended within"):
        staging.wait_for(event, group)  # type: ignore[arg-type]


def test_ranks_take_the_first_gpus(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    config = Config(str(tiny_qwen3), tensor_parallel_size=2)
    devices = [config.on_rank(rank).torch_device for rank in range(2)]
    assert devices == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert config.torch_device == devices[0]
    with pytest.raises(ValueError, match=r"_size=5, but torch sees 4 GPUs; use at most 4"):
        Config(str(tiny_qwen3), tensor_parallel_size=5)
    with pytest.raises(ValueError, match=r"device='cuda:1' .* takes cuda:0 to cuda:1; .*VISIBLE"):
        Config(str(tiny_qwen3), tensor_parallel_size=2, device="cuda:1")
    monkeypatch.setattr(Workers, "start", lambda *_: pytest.fail("it has started"))
    monkeypatch.setattr(executor, "has_nccl", lambda: False)
    with pytest.raises(RuntimeError, match="needs NCCL"):
        make_runner(config)
