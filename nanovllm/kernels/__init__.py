"""Kernels, one subject a file: Triton's, imported on CUDA only (or under Triton's interpreter), and
numba's for CPUs.

In Triton's, shapes and strides that vary from step to step are `do_not_specialize`, so that nothing
is compiled after construction; addresses into the K/V pool are 64 bits wide.
"""

import functools
import logging
from types import ModuleType

import torch

logger = logging.getLogger(__name__)
CPU_DTYPES = (torch.bfloat16, torch.float32)


def cpu_kernels(x: torch.Tensor) -> ModuleType | None:
    """`kernels.cpu` if `x` is on a CPU and they are faster there than torch, else None."""
    cpu = compile_cpu_kernels(x.dtype) if x.is_cpu else None
    return cpu if cpu is not None and cpu.is_faster(x.numel()) else None


@functools.cache
def compile_cpu_kernels(dtype: torch.dtype) -> ModuleType | None:
    """`kernels.cpu`, compiled for this dtype; None if there is none for it, or numba fails."""
    if dtype not in CPU_DTYPES:
        return None
    try:
        from nanovllm.kernels import cpu

        cpu.compile_kernels(dtype)
    except Exception as error:  # numba is missing or does not go with this numpy: torch can do it
        logger.warning("no kernels for the CPU, it is slower without: %r", error)
        return None
    return cpu
