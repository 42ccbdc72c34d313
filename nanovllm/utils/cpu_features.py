"""What this CPU and oneDNN can do. It depends on the CPU, the dtype and the torch version."""

import platform

import torch


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def widens_halves() -> bool:
    """Whether this CPU has instructions that widen fp16. x86 CPUs have them together with AVX2."""
    return not is_x86() or torch.backends.cpu.get_cpu_capability().startswith("AVX")


def has_onednn() -> bool:
    """Whether this is an x86 CPU and a torch with oneDNN."""
    return torch.backends.mkldnn.is_available() and is_x86()


def can_multiply(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies tensors of this dtype on this CPU, however slowly."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in this dtype itself.

    Where AVX-512 comes without bf16, oneDNN accepts bf16 but converts every weight to fp32.
    """
    has_bf16 = True
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        # Not there before torch 2.5.
        has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)()
    return has_bf16 and can_multiply(dtype)
