"""The surroundings of a benchmark that its figures depend on: configuration, versions, machine."""

import os
from dataclasses import asdict, fields
from typing import Any

import torch

from benchmarks.roofline import Shape
from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.report import device_name, versions


def describe(llm: LLM) -> dict[str, Any]:
    """Returns the engine's configuration, the model's shape, versions and machine, fit for JSON."""
    config = {f.name: getattr(llm.config, f.name) for f in fields(Config) if f.name != "hf_config"}
    config["num_kvcache_blocks"] = llm.scheduler.block_manager.num_blocks  # what -1 stands for
    return {
        "config": {k: str(v) if k.startswith("torch_") else v for k, v in config.items()},
        "shape": asdict(Shape.of(llm.config)),
        "versions": versions(),
        "device_name": device_name(llm.config.torch_device),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
    }
