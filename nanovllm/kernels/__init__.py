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


def cpu_kernels(x: torch.Tensor) -> ModuleType | None:
    """`kernels.cpu` if `x` is on a CPU and they are faster there than torch, else None."""
    cpu = import_cpu_kernels() if x.is_cpu else None
    return cpu if cpu is not None and cpu.serves(x) else None


@functools.cache
def import_cpu_kernels() -> ModuleType | None:
    """`kernels.cpu`; None where numba is missing, or refuses this version of numpy."""
    try:
        from nanovllm.kernels import cpu
    except (ImportError, OSError) as error:
        logger.warning("decoding on the CPU is slower than it could be: %s", error)
        return None
    return cpu
