"""Programmatic dependent launch (Hopper and later): a kernel's programs are launched while the
kernel before drains, and wait inside for its results. Saves the launch latency between kernels.

Contract: a kernel launched with `launch_options` calls `wait_for_previous` before it touches global
memory. Kernels launched without simply run one after the other, before and after.
"""

import functools
from dataclasses import fields
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Lets the next kernel's programs launch, and waits until the previous kernel has completed."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Keywords for a kernel that takes a constexpr `PDL`: off where GPU or Triton cannot."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    from triton.backends.nvidia.compiler import CUDAOptions

    if "launch_pdl" not in {field.name for field in fields(CUDAOptions)}:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
