"""Kernels, one subject per file: Triton kernels, which are imported on CUDA or under Triton's
interpreter only, and numba kernels for CPUs.

Triton kernels mark sizes and strides that vary from step to step as `do_not_specialize`, so that no
step compiles anything after construction. Offsets into the K/V pool are 64 bits wide.
"""

import functools
import logging
from time import perf_counter
from types import ModuleType

import torch

from nanovllm.utils.cpu_features import has_instructions, has_onednn, widens_halves

logger = logging.getLogger("nanovllm")
CPU_DTYPES = (torch.bfloat16, torch.float32)  # of activations


def cpu_kernels(x: torch.Tensor) -> ModuleType | None:
    """Returns the module `kernels.cpu` if its kernels serve activations like x, else None: x must
    be on a CPU, have one of `CPU_DTYPES`, and be of a size for which they are faster than torch."""
    if not x.is_cpu or x.dtype not in CPU_DTYPES:
        return None
    cpu = cpu_module()
    return cpu if cpu is not None and cpu.is_faster(x) else None


@functools.cache
def cpu_module() -> ModuleType | None:
    """Returns the module `kernels.cpu`; None if the CPU is too old, or numba missing or broken."""
    if not widens_halves():
        return None
    try:
        from nanovllm.kernels import cpu

        cpu.compile_threads()
    except Exception as error:  # numba is missing or rejects this numpy; torch does the work
        logger.warning("no kernels for the CPU, it is slower without: %r", error)
        return None
    return cpu


def compile_cpu_kernels(dtype: torch.dtype, has_attention: bool) -> None:
    """Compiles all kernels of `kernels.cpu` that an engine with weights and K/V in `dtype` runs.

    has_attention: whether it attends by them, too. What numba has compiled before, in any process,
    it finds on disk.
    """
    x = torch.float32 if cpu_multiplies(dtype) else dtype
    cpu = cpu_module()
    if cpu is None or x not in CPU_DTYPES:
        return
    start = perf_counter()
    cpu.compile_kernels(x, dtype, has_attention)
    seconds = perf_counter() - start
    if seconds > 1:
        logger.debug("compiled the kernels for this CPU in %.0f s, and keeps them on disk", seconds)


@functools.cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Returns whether weights in `dtype` are multiplied by `kernels.cpu`, in fp32, rather than by
    oneDNN: where the CPU would have to widen them anyway. With AVX-512 it has not been measured."""
    is_wide = dtype == torch.float32 or not has_instructions(dtype)
    is_measured = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return has_onednn() and is_wide and is_measured and cpu_module() is not None
