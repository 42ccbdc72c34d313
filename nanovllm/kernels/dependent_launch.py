"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for
it only where it needs its results (NVIDIA GPUs from Hopper on).

Invariants of the kernels launched with `dependent_launch`:

- Every program waits before it writes anything, and before it reads what a kernel of the step has
  written. When a wait is over, all kernels before are complete: each of them has waited too, or was
  launched without this and began after all before it.
- Before it waits, a program reads at most weights and the metadata of the step (positions and
  `Context`): what is complete when the embedding lookup begins, which is launched without this.
"""

import functools

import torch
import triton
import triton.language as tl

# Up to so many tokens, weights are all that a decode step reads, and each kernel is too short to
# keep the memory busy: the kernels after it start at once, and fetch weights. With more tokens this
# takes memory bandwidth from the kernels that they wait for, and costs more than it brings.
FEW_TOKENS = 4


@triton.jit
def wait_for_previous(HAS_PDL: tl.constexpr):
    """Waits until the kernel before this one has completed and its writes are visible."""
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(HAS_PDL: tl.constexpr):
    """Lets the next kernel start once all programs of this one have come here or ended."""
    if HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(ptr):
    """Fetches the 128 bytes around each pointer into the L2 cache; for kernels with `HAS_PDL`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Returns whether this GPU can start a kernel while the one before it still runs."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device, is_worth_it: bool = True) -> dict[str, bool]:
    """Returns the arguments for launching a kernel that has the parameter `HAS_PDL`."""
    if not (is_worth_it and has_dependent_launch(device)):
        return {"HAS_PDL": False}
    return {"HAS_PDL": True, "launch_pdl": True}
