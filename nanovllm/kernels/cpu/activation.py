"""The gated activation of SwiGLU."""

import struct

import numpy as np
import torch
from numba import carray, njit

from nanovllm.kernels.cpu.compile import address_of
from nanovllm.kernels.cpu.storage import exp, pointer
from nanovllm.kernels.cpu.threads import rows_per_chunk, run


@njit(fastmath={"contract"}, error_model="numpy")
def _silu_row(gate_up, i, out):
    size = out.shape[1]
    for j in range(size):
        gate = gate_up[i, j]
        out[i, j] = gate / (np.float32(1) + exp(-gate)) * gate_up[i, size + j]


def _silu_and_mul(arguments, x_like, data_like, chunk):
    num_tokens, size = arguments[2], arguments[3]
    gate_up = carray(pointer(arguments[0], x_like), (num_tokens, 2 * size))
    out = carray(pointer(arguments[1], x_like), (num_tokens, size))
    first = chunk * arguments[4]
    for i in range(first, min(first + arguments[4], num_tokens)):
        _silu_row(gate_up, i, out)


_pack_arguments = struct.Struct("5q").pack


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes SiLU(gate) * up: gate_up fp32 [t, 2 * n], gate | up -> [t, n]."""
    num_tokens, size = gate_up.shape
    assert gate_up.dtype == torch.float32
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_tokens, size // 2)
    rows = rows_per_chunk(gate_up)
    arguments = _pack_arguments(gate_up.data_ptr(), out.data_ptr(), num_tokens, size // 2, rows)
    kernel = address_of(_silu_and_mul, out.dtype, out.dtype)
    run(kernel, arguments, -(-num_tokens // rows))
    return out
