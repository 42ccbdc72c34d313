"""Compiles CPU kernels with numba, and keeps the code on disk.

A kernel is a function of (arguments, x, data, chunk): the address of its arguments, 8 bytes each;
two null pointers, whose types say how activations and weights or K/V are stored; and the part of
the work to do, from 0 on. Parts may run at the same time, so they write to different places.
"""

import functools
import hashlib
from collections.abc import Callable
from importlib.resources import files
from types import FunctionType
from typing import Any

import torch
from numba import cfunc, types

from nanovllm.kernels.cpu.storage import STORAGE

# Read as resources, which may lie in a zip file.
_FILES = sorted(files(__package__).iterdir(), key=lambda file: file.name)
_SOURCES = [file.read_bytes() for file in _FILES if file.name.endswith(".py")]
VERSION = hashlib.sha256(b"".join(_SOURCES)).hexdigest()[:16]

Kernel = Callable[..., None]


@functools.cache
def address_of(kernel: Kernel, x: torch.dtype, data: torch.dtype) -> int:
    """Returns the address of the kernel's machine code for these dtypes; compiles it if need be."""
    index = types.int64
    like = [types.CPointer(STORAGE[dtype]) for dtype in (x, data)]
    signature = types.void(types.CPointer(index), *like, index)
    address: int = _code(kernel, signature, f"{x}_{data}").address
    return address


@functools.cache
def _code(function: Kernel, signature: Any, variant: str) -> Any:
    """Returns numba's C function, which must live as long as its address is used.

    Compilation takes up to a second, so the result is cached on disk as well.
    """
    assert isinstance(function, FunctionType)
    # Numba neither locks its cache files nor checks their contents. It names them after the
    # function, so a name per variant and version of these files gives each its own.
    renamed = FunctionType(function.__code__, function.__globals__, function.__name__)
    renamed.__qualname__ = f"{function.__name__}_{variant}_{VERSION}"
    try:
        return cfunc(signature, cache=True)(renamed)
    except Exception:  # no writable folder, a full disk or a damaged file: do without
        return cfunc(signature)(renamed)


def function_of(function: Kernel, *arguments: Any) -> int:
    """Returns the address of a C function without a result that takes these numba types."""
    address: int = _code(function, types.void(*arguments), "").address
    return address
