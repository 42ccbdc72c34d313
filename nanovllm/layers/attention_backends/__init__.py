"""Selects the attention backend of an engine."""

import importlib.util
from dataclasses import dataclass

import torch

from nanovllm.kernels import cpu_module, cpu_multiplies
from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.attention_backends.flash_attn import BLOCK_MULTIPLE, FlashAttnBackend
from nanovllm.layers.attention_backends.numba import NumbaBackend
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.layers.attention_backends.triton import TritonBackend
from nanovllm.utils.shown import shown

BACKENDS: dict[str, type[AttentionBackend]] = {  # fastest first
    "triton": TritonBackend,
    "flash_attn": FlashAttnBackend,
    "numba": NumbaBackend,
    "torch": TorchBackend,
}
READ_FP8 = ("triton", "torch")  # K/V in 8 bits


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The properties of an engine that decide whether a backend can serve it.

    dtype: of the model. kv_cache_dtype: "auto" for K/V in the same, "fp8" for codes and scales.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block_size: int
    kv_cache_dtype: str = "auto"


def select_backend(name: str, layout: AttentionLayout) -> AttentionBackend:
    """Returns the named backend, or for "auto" the fastest that can serve `layout`.

    Raises `ValueError` with the reason if the named one cannot.
    """
    if name == "auto":
        reasons = {name: unfit_reason(name, layout) for name in BACKENDS}
        name = next((name for name in BACKENDS if reasons[name] is None), "torch")
    if name not in BACKENDS:
        raise ValueError(
            f"attention_backend must be 'auto' or one of {', '.join(BACKENDS)}, got {shown(name)}"
        )
    reason = unfit_reason(name, layout)
    if reason is not None:
        raise ValueError(f"attention backend {name!r} cannot be used: {reason}")
    return BACKENDS[name]()


def unfit_reason(name: str, layout: AttentionLayout) -> str | None:
    """Returns why the backend cannot serve `layout`, with the fix; None if it can."""
    block_size = layout.block_size
    if block_size & (block_size - 1):
        return f"kvcache_block_size={block_size} is no power of two; use e.g. 256"
    if layout.kv_cache_dtype == "fp8":
        reason = _unfit_for_fp8(name, layout)
        if reason is not None:
            return reason
    if name == "torch":
        return None
    if name == "numba":
        return _unfit_for_numba(layout)
    if layout.device.type != "cuda":
        return f"it needs a CUDA GPU, the device is {layout.device.type!r}; use 'torch'"
    if importlib.util.find_spec(name) is None:
        package = name.replace("_", "-")
        return f"the package {package} is not installed; pip install {package}, or use 'auto'"
    if torch.cuda.get_device_capability(layout.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 (Ampere) or later; use 'torch'"
    if layout.head_dim > 256:
        return f"head_dim={layout.head_dim} exceeds 256; use 'torch'"
    if name == "flash_attn":
        return _unfit_for_flash_attn(layout)
    return None


def _unfit_for_fp8(name: str, layout: AttentionLayout) -> str | None:
    if name not in READ_FP8:
        backends = "' or '".join(READ_FP8)
        return f"it does not read kv_cache_dtype='fp8'; use '{backends}', or kv_cache_dtype='auto'"
    if layout.device.type == "cuda":
        capability = torch.cuda.get_device_capability(layout.device)
        if capability < (8, 9):
            return (
                "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 (Ada) or later, this "
                f"one has {'.'.join(map(str, capability))}; use kv_cache_dtype='auto'"
            )
    return None


def _unfit_for_numba(layout: AttentionLayout) -> str | None:
    if layout.device.type != "cpu":
        return f"it needs a CPU, the device is {layout.device.type!r}; use 'auto'"
    if cpu_module() is None:
        return "it needs numba and, on x86, a CPU with AVX2; pip install numba, or use 'torch'"
    if not cpu_multiplies(layout.dtype):
        return f"oneDNN or torch multiplies in {layout.dtype} here, on other threads; use 'torch'"
    return None


def _unfit_for_flash_attn(layout: AttentionLayout) -> str | None:
    if layout.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {layout.dtype} is neither float16 nor bfloat16; use 'triton'"
    if layout.head_dim % 8:
        return f"head_dim={layout.head_dim} is no multiple of 8; use 'triton'"
    if layout.block_size % BLOCK_MULTIPLE:
        return (
            f"kvcache_block_size={layout.block_size} is no multiple of {BLOCK_MULTIPLE}; "
            f"use {BLOCK_MULTIPLE}, or 'triton'"
        )
    return None
