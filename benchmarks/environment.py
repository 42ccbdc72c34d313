"""What a benchmark's figures depend on besides the code: configuration, versions, machine."""

import os
from dataclasses import asdict, fields
from typing import Any

import torch

from benchmarks.roofline import Shape
from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.report import device_name, versions


def describe(llm: LLM) -> dict[str, Any]:
    """The engine's configuration, the model's shape, the versions and the machine, for JSON."""
    config = {f.name: getattr(llm.config, f.name) for f in fields(Config) if f.name != "hf_config"}
    config["num_kvcache_blocks"] = llm.scheduler.block_manager.num_blocks  # measured, if it was -1
    return {
        "config": {k: str(v) if k.startswith("torch_") else v for k, v in config.items()},
        "shape": asdict(Shape.of(llm.config)),
        "versions": versions(),
        "device_name": device_name(llm.config.torch_device),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
    }
