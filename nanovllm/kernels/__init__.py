"""Kernels, one subject per file: Triton kernels, which are imported on CUDA or under Triton's
interpreter only, and numba kernels for CPUs.

Triton kernels mark sizes and strides that vary from step to step as `do_not_specialize`, so that no
step compiles anything after construction. Offsets into the K/V pool are 64 bits wide.
"""

import functools
import logging
from types import ModuleType

import torch

logger = logging.getLogger(__name__)
CPU_DTYPES = (torch.bfloat16, torch.float32)


def cpu_kernels(x: torch.Tensor) -> ModuleType | None:
    """Returns the module `kernels.cpu` if its kernels serve `x`, else None: `x` must be on a CPU,
    have one of `CPU_DTYPES`, and be of a size for which they are faster than torch."""
    cpu = compile_cpu_kernels(x.dtype) if x.is_cpu else None
    return cpu if cpu is not None and cpu.is_faster(x.numel()) else None


@functools.cache
def compile_cpu_kernels(dtype: torch.dtype) -> ModuleType | None:
    """Compiles the kernels of `kernels.cpu` for `dtype` and returns that module.

    Returns None if the kernels do not support the dtype, or if numba fails.
    """
    if dtype not in CPU_DTYPES:
        return None
    try:
        from nanovllm.kernels import cpu

        cpu.compile_kernels(dtype)
    except Exception as error:  # numba is missing or rejects this numpy; torch does the work
        logger.warning("no kernels for the CPU, it is slower without: %r", error)
        return None
    return cpu
