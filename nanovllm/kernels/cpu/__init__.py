"""Kernels for CPUs, compiled by numba: each does in one pass what takes torch many small
operations, whose overhead exceeds their arithmetic.

They take activations in fp32, or in bf16 where the CPU multiplies in bf16 itself.
"""

import torch

from nanovllm.kernels.cpu.activation import _silu_and_mul, silu_and_mul
from nanovllm.kernels.cpu.argmax import _argmax, max_of_rows
from nanovllm.kernels.cpu.attention import _attend, attend
from nanovllm.kernels.cpu.compile import address_of
from nanovllm.kernels.cpu.matmul import _matmul, linear, pack, padded, rows, unpack
from nanovllm.kernels.cpu.norm import _add_rms_norm, _norm_rope_store, add_rms_norm, norm_rope_store
from nanovllm.kernels.cpu.prefill_attention import (
    _attend_many,
    _pack_kv,
    attend_many,
    plan_prefill,
)
from nanovllm.kernels.cpu.threads import compile_threads, uses_own_threads

__all__ = [
    "add_rms_norm",
    "attend",
    "attend_many",
    "compile_kernels",
    "compile_threads",
    "is_faster",
    "linear",
    "max_of_rows",
    "norm_rope_store",
    "pack",
    "padded",
    "plan_prefill",
    "rows",
    "silu_and_mul",
    "unpack",
]

MAX_ELEMENTS, MAX_THREADS = 1 << 17, 2  # torch may be faster above both limits


def compile_kernels(x: torch.dtype, data: torch.dtype, has_attention: bool) -> None:
    """Compiles the kernels that run with activations in `x` and weights and K/V in `data`."""
    address_of(_add_rms_norm, x, x)
    address_of(_norm_rope_store, x, data)
    if x != torch.float32:
        return
    address_of(_silu_and_mul, x, x)
    address_of(_argmax, x, x)
    if uses_own_threads(x):
        address_of(_matmul, x, data)
    if has_attention:
        address_of(_attend, x, data)
        address_of(_pack_kv, x, data)
        address_of(_attend_many, x, x)


def is_faster(x: torch.Tensor) -> bool:
    """Returns whether the kernels beat torch on x; beside torch's threads they run on one."""
    is_small = x.numel() <= MAX_ELEMENTS or torch.get_num_threads() <= MAX_THREADS
    return uses_own_threads(x.dtype) or is_small
