"""Describes an installation for a bug report: versions, GPUs, CPU, and how a checkpoint would run.

Run: python -m nanovllm.report [--model DIR] [--json]

It works without a GPU, triton and flash-attn, and reads no weights. Whatever is wrong with the
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

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.kernels import cpu_kernels
from nanovllm.layers.attention_backends import (
    BACKENDS,
    AttentionLayout,
    select_backend,
    unfit_reason,
)
from nanovllm.layers.cpu_weights import PackedWeight, activation_dtype, arranged
from nanovllm.models import model_outline
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.host_memory import host_memory

PACKAGES = ["triton", "transformers", "tokenizers", "safetensors", "numba", "numpy", "flash-attn"]
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET")
GIB = 2**30


def version(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # A folder on the path can be imported, but has no metadata.
        is_importable = importlib.util.find_spec(package.replace("-", "_")) is not None
        return "unknown" if is_importable else None


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of all packages that an engine's results depend on."""
    own = {"nanovllm": version("nanovllm"), "python": platform.python_version()}
    # torch's own version names its build, such as +cu130, which the metadata may not.
    return own | {"torch": torch.__version__} | {name: version(name) for name in PACKAGES}


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or of the host's CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has it
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Describes the GPUs that torch sees, the CPU, and what the environment sets."""
    found = {"CUDA": torch.version.cuda or "none in this build of torch", "GPU": "torch sees none"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        found.pop("GPU", None)
        size = f"{gpu.total_memory / GIB:.1f} GiB"
        found[f"GPU {index}"] = f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {size}"
    memory = host_memory()
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    found["CPU"] = f"{device_name(torch.device('cpu'))}, {capability}"
    found["threads"] = f"torch uses {threads}, the host has {os.cpu_count()} CPUs"
    found["memory"] = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def engine_choices(config: Config) -> dict[str, str]:
    """Describes what an engine of this configuration computes with.

    Raises `ValueError` if such an engine would be refused.
    """
    hf_config, device, dtype = config.hf_config, config.torch_device, config.torch_dtype
    model = model_outline(
        hf_config, TPGroup(), max_model_len=config.max_model_len, tie_word_embeddings=True
    )
    head_dim = model.attention_layers[0].head_dim
    layout = AttentionLayout(
        device, dtype, head_dim, config.kvcache_block_size, config.kv_cache_dtype
    )
    backend = select_backend(config.attention_backend, layout).name
    layers, size = hf_config.num_hidden_layers, hf_config.hidden_size
    found = {
        "model": f"{', '.join(hf_config.architectures or [])}, {layers} layers, hidden size {size}",
        "computes": f"in {_name(dtype)} on {device}",
        "attention": backend,
    }
    if device.type == "cuda":
        is_tuned = config.autotune_matmul and not config.enforce_eager and dtype.itemsize == 2
        found["kernels"] = "triton"
        found["matmul"] = "torch" + ", or autotuned in CUDA graphs" * (
            is_tuned and backend != "torch"
        )
    else:
        weight = arranged(nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=False))
        x = torch.empty(1, dtype=activation_dtype(weight))
        found["kernels"] = "torch" if cpu_kernels(x) is None else "numba"
        layout_name = "oneDNN's" if weight.is_mkldnn else "torch's"
        if isinstance(weight, PackedWeight):
            layout_name = "numba's"
        found["matmul"] = f"weights in {layout_name} layout, {_name(weight.dtype)}"
    reasons = {f"not {name}": unfit_reason(name, layout) for name in BACKENDS}
    return found | {name: reason for name, reason in reasons.items() if reason is not None}


def report(model: str | None = None) -> dict[str, str | None]:
    """Returns all lines of the report by name. The value of a package that is missing is None."""
    found = versions() | machine()
    if model is not None:
        try:
            found |= engine_choices(Config(model))
        except Exception as error:  # of whatever kind: a report of a broken installation needs it
            found["model"] = f"{type(error).__name__}: {error}"
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.report", description="Describe this installation."
    )
    parser.add_argument("--model", help="checkpoint directory; adds how it would run by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args(argv)
    found = report(args.model)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found)) + 2
    for name, value in found.items():
        print(f"{name:<{width}}{value or 'not installed'}")


if __name__ == "__main__":
    main()
