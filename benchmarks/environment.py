"""What a benchmark's figures depend on besides the code: configuration, versions, machine."""

import os
import platform
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.roofline import Shape
from nanovllm import LLM
from nanovllm.config import Config

PACKAGES = ("nanovllm", "triton", "transformers")


def describe(llm: LLM) -> dict[str, Any]:
    """The engine's configuration, the model's shape, the versions and the machine, for JSON."""
    config = {f.name: getattr(llm.config, f.name) for f in fields(Config) if f.name != "hf_config"}
    config["num_kvcache_blocks"] = llm.scheduler.block_manager.num_blocks  # measured, if it was -1
    versions = {name: version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}  # with its build
    return {
        "config": {k: str(v) if k.startswith("torch_") else v for k, v in config.items()},
        "shape": asdict(Shape.of(llm.config)),
        "versions": versions,
        "device_name": device_name(llm.config.torch_device),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # Linux; elsewhere platform knows
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
