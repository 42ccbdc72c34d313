"""Describes an installation for a bug report: versions, GPUs, CPU, and how a checkpoint would run.

Run: python -m nanovllm.report [--model DIR] [--json]

It works without a GPU, triton and flash-attn, and reads no weights. Whatever goes wrong with the
checkpoint becomes a line of the report.
"""

import argparse
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.kernels import compile_cpu_kernels
from nanovllm.layers.attention_backends import (
    BACKENDS,
    AttentionLayout,
    select_backend,
    unfit_reason,
)
from nanovllm.layers.onednn import reordered
from nanovllm.models import model_class
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.host_memory import host_memory

PACKAGES = (
    "triton",
    "flash-attn",
    "transformers",
    "tokenizers",
    "safetensors",
    "numba",
    "numpy",
)
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET")
GIB = 2**30


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # A folder on the path can be imported, but has no metadata.
        is_importable = importlib.util.find_spec(package.replace("-", "_")) is not None
        return "unknown" if is_importable else None


def versions() -> dict[str, str | None]:
    """The versions of Python and of all packages that an engine's results depend on."""
    found = {
        "nanovllm": version("nanovllm"),
        "python": platform.python_version(),
        "torch": torch.__version__,  # names its build, such as +cu130, which the metadata may not
    }
    return found | {package: version(package) for package in PACKAGES}


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the host's CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has it
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees, in the order of their indices."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / GIB, 1),
            }
        )
    return found


def cpu() -> dict[str, Any]:
    """The host's CPU, its threads and its memory; `capability` is the instruction set that torch
    uses."""
    memory = host_memory()
    return {
        "name": device_name(torch.device("cpu")),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
        "memory_gib": round(memory.total / GIB, 1),
        "available_memory_gib": round(memory.available / GIB, 1),
    }


def engine_choices(config: Config) -> dict[str, Any]:
    """What an engine with this configuration computes with. `ValueError` if it would be refused.

    attention_backends: for each backend the reason why it cannot be used, None if it can.
    """
    cls, dtype = model_class(config.hf_config), config.torch_dtype
    with torch.device("meta"):  # shapes only
        model = cls(config.hf_config, TPGroup(), tie_word_embeddings=True)
    head_dim = model.attention_layers[0].head_dim
    layout = AttentionLayout(config.torch_device, dtype, head_dim, config.kvcache_block_size)
    backend = select_backend(config.attention_backend, layout).name
    is_cuda = config.torch_device.type == "cuda"
    return {
        "architectures": config.hf_config.architectures,
        "num_layers": config.hf_config.num_hidden_layers,
        "hidden_size": config.hf_config.hidden_size,
        "device": str(config.torch_device),
        "dtype": str(dtype).removeprefix("torch."),
        "attention_backend": backend,
        "attention_backends": {name: unfit_reason(name, layout) for name in BACKENDS},
        "kernels": "triton" if is_cuda else _cpu_kernels(dtype),
        "matmul": _gpu_matmul(config, backend) if is_cuda else _cpu_matmul(dtype),
    }


def _cpu_kernels(dtype: torch.dtype) -> str:
    has_kernels = compile_cpu_kernels(dtype) is not None
    return "numba in small steps, else torch" if has_kernels else "torch"


def _gpu_matmul(config: Config, backend: str) -> str:
    is_captured = not config.enforce_eager and backend != "torch"
    if config.autotune_matmul and is_captured and config.torch_dtype.itemsize == 2:
        return "torch, or in captured decode steps what autotune_matmul measures to be faster"
    return "torch"


def _cpu_matmul(dtype: torch.dtype) -> str:
    """Finds out how a linear layer keeps its weight on this CPU."""
    weight = reordered(nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=False))
    layout = "oneDNN's layout" if weight.is_mkldnn else "torch's layout"
    return f"weights in {layout}, {str(weight.dtype).removeprefix('torch.')}"


def report(model: str | None = None) -> dict[str, Any]:
    """Everything that `python -m nanovllm.report` prints, ready for JSON."""
    found: dict[str, Any] = {
        "versions": versions(),
        "cuda": torch.version.cuda,
        "gpus": gpus(),
        "cpu": cpu(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if model is not None:
        try:
            found["model"] = engine_choices(Config(model))
        except Exception as error:  # of whatever kind: a report of a broken installation needs it
            found["model"] = {"error": f"{type(error).__name__}: {error}"}
    return found


def as_text(found: dict[str, Any]) -> str:
    """A report as aligned lines."""
    rows = [(name, version or "not installed") for name, version in found["versions"].items()]
    rows.append(("CUDA", found["cuda"] or "none in this build of torch"))
    for index, gpu in enumerate(found["gpus"]):
        name, capability, memory = gpu.values()
        rows.append((f"GPU {index}", f"{name}, capability {capability}, {memory} GiB"))
    if not found["gpus"]:
        rows.append(("GPU", "torch sees none"))
    host = found["cpu"]
    rows += [
        ("CPU", f"{host['name']}, {host['capability']}"),
        (
            "threads",
            f"torch uses {host['num_torch_threads']}, the host has {host['num_cpus']} CPUs",
        ),
        ("memory", f"{host['available_memory_gib']} of {host['memory_gib']} GiB available"),
        *found["environment"].items(),
    ]
    if "model" in found:
        rows += _model_rows(found["model"])
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _model_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in model:
        return [("model", model["error"])]
    size = f"{model['num_layers']} layers, hidden size {model['hidden_size']}"
    rows = [
        ("model", f"{', '.join(model['architectures'])}, {size}"),
        ("computes", f"in {model['dtype']} on {model['device']}"),
        ("attention", model["attention_backend"]),
        ("kernels", model["kernels"]),
        ("matmul", model["matmul"]),
    ]
    for name, reason in model["attention_backends"].items():
        if reason is not None:
            rows.append((f"not {name}", reason))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.report", description="Describe this installation."
    )
    parser.add_argument("--model", help="checkpoint directory; adds how it would run by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args(argv)
    found = report(args.model)
    print(json.dumps(found, indent=2) if args.json else as_text(found))


if __name__ == "__main__":
    main()
