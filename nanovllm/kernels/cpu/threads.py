"""Runs CPU kernels on several threads, as many as torch uses.

The calling thread does the work and helpers take parts of it: whoever is free takes the next part.
So a helper that sleeps, or whose core is busy, or that a fork has not copied, delays nobody; this
is why torch's own threads, which meet at barriers, are not used. Between two kernels helpers wait
actively for a while, then they sleep.
"""

import ctypes
import functools
import os
import threading
import weakref

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.kernels.cpu.compile import function_of

# Of a job, what changes often in cache lines of their own: parts not taken, parts done, the kernel,
# its arguments, how many helpers sleep, whether they shall end, then C functions and a semaphore.
REMAINING, DONE, KERNEL, ARGUMENTS, NUM_ASLEEP, HAS_ENDED = 0, 8, 16, 17, 24, 25
YIELD, SEM_WAIT, SEM_POST, SEMAPHORE, SEMAPHORE_DATA = 32, 33, 34, 35, 40
JOB_SIZE = 48
ELEMENTS_PER_CHUNK = 1 << 14  # some 5 microseconds
SPINS = 10_000  # until a helper sleeps, some 0.2 ms
SPINS_TO_YIELD = 200  # until another thread that waits for this core gets it


@intrinsic
def _add(typing_context, job, index, value):
    """Adds to an element of `job` atomically; returns what it was before."""

    def generate(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", place, args[2], "seq_cst")

    return types.int64(job, types.int64, types.int64), generate


@intrinsic
def _exchange(typing_context, job, index, value):
    """Replaces an element of `job` atomically; returns what it was before."""

    def generate(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("xchg", place, args[2], "seq_cst")

    return types.int64(job, types.int64, types.int64), generate


@intrinsic
def _read(typing_context, job, index):
    """Returns an element of `job` that other threads change."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "seq_cst", 8)

    return types.int64(job, types.int64), generate


@intrinsic
def _write(typing_context, job, index, value):
    """Writes an element of `job` after everything that was written before."""

    def generate(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        builder.store_atomic(args[2], place, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(job, types.int64, types.int64), generate


@intrinsic
def _call(typing_context, kernel, arguments, chunk):
    """Calls the kernel at an address for one part; or another C function, of one argument."""

    def generate(context, builder, signature, args):
        kernel, arguments, chunk = args
        null = ir.IntType(64)(0)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)
        builder.call(builder.inttoptr(kernel, kind.as_pointer()), [arguments, null, null, chunk])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _pause(typing_context):
    """Tells the CPU that this thread only waits."""

    def generate(context, builder, signature, args):
        if builder.module.triple.startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), []
            )
        return context.get_dummy_value()

    return types.void(), generate


@njit
def _wait(job, spins):
    """Waits a moment; now and then it offers this core to other threads."""
    _pause()
    if spins % SPINS_TO_YIELD == 0:
        _call(job[YIELD], 0, 0)


@njit
def _take_parts(job):
    """Does parts of the current job until all are taken."""
    while True:
        chunk = _add(job, REMAINING, -1) - 1
        if chunk < 0:
            return
        # Whoever has a part keeps the job from ending, so these stay as they are.
        _call(job[KERNEL], job[ARGUMENTS], chunk)
        _add(job, DONE, 1)


def _run(job, kernel, arguments, num_chunks):
    """Does a job together with the helpers; returns when all parts are done."""
    job[KERNEL] = kernel
    job[ARGUMENTS] = arguments
    _write(job, DONE, 0)
    _write(job, REMAINING, num_chunks)
    # A helper that falls asleep right now misses this job and is woken for the next one.
    for _ in range(_exchange(job, NUM_ASLEEP, 0) if _read(job, NUM_ASLEEP) else 0):
        _call(job[SEM_POST], job[SEMAPHORE], 0)
    _take_parts(job)
    spins = 0
    while _read(job, DONE) < num_chunks:
        spins += 1
        _wait(job, spins)


def _run_alone(kernel, arguments, num_chunks):
    """Does all parts on this thread."""
    for chunk in range(num_chunks):
        _call(kernel, arguments, chunk)


def _help(job):
    """Does parts of jobs until the helpers shall end; sleeps after `SPINS` without a job."""
    spins = 0
    while not _read(job, HAS_ENDED):
        if _read(job, REMAINING) > 0:
            _take_parts(job)
            spins = 0
        elif spins < SPINS:
            spins += 1
            _wait(job, spins)
        else:
            _add(job, NUM_ASLEEP, 1)
            _call(job[SEM_WAIT], job[SEMAPHORE], 0)
            spins = 0


class Threads:
    """The calling thread and `size` - 1 helpers, which never need Python's lock."""

    def __init__(self, size: int) -> None:
        index, job = types.int64, types.CPointer(types.int64)
        # torch aligns it to a cache line; as an array it does not care about inference mode.
        self._job = torch.zeros(JOB_SIZE, dtype=torch.int64).numpy()
        self._address = self._job.ctypes.data
        self._lock = threading.Lock()
        in_c, pointer = ctypes.c_int64, ctypes.c_void_p
        self._run_alone = ctypes.CFUNCTYPE(None, in_c, pointer, in_c)(
            function_of(_run_alone, index, index, index)
        )
        self._run = ctypes.CFUNCTYPE(None, pointer, in_c, pointer, in_c)(
            function_of(_run, job, index, index, index)
        )
        if size > 1 and not _prepare(self._job):
            size = 1
        help_ = ctypes.CFUNCTYPE(None, pointer)(function_of(_help, job))
        self._helpers = [
            threading.Thread(target=help_, args=(self._address,), daemon=True)
            for _ in range(size - 1)
        ]
        for helper in self._helpers:
            helper.start()
        # The machine code is unmapped when the interpreter ends: nobody may be in it.
        weakref.finalize(self, _end, self._job, self._helpers)

    def run(self, kernel: int, arguments: bytes, num_chunks: int) -> None:
        """Runs all parts of a kernel; alone if there is one part, or if another thread runs some.

        kernel: the address of its code. arguments: 8 bytes each.
        """
        if num_chunks == 1 or not self._helpers or not self._lock.acquire(blocking=False):
            self._run_alone(kernel, arguments, num_chunks)
            return
        try:
            self._run(self._address, kernel, arguments, num_chunks)
        finally:
            self._lock.release()


def _prepare(job: np.ndarray) -> bool:
    """Makes the semaphore behind which helpers sleep; returns whether this system has such."""
    try:
        in_c = ctypes.CDLL(None)
        functions = in_c.sched_yield, in_c.sem_wait, in_c.sem_post
        for index, function in zip((YIELD, SEM_WAIT, SEM_POST), functions, strict=True):
            job[index] = ctypes.cast(function, ctypes.c_void_p).value
        job[SEMAPHORE] = job.ctypes.data + 8 * SEMAPHORE_DATA
        in_c.sem_init.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
        return bool(in_c.sem_init(int(job[SEMAPHORE]), 0, 0) == 0)
    except (AttributeError, OSError, TypeError):  # Windows
        return False


def _end(job: np.ndarray, helpers: list[threading.Thread]) -> None:
    """Ends the helpers."""
    if not helpers or not helpers[0].is_alive():  # a forked child has none
        return
    job[HAS_ENDED] = 1
    sem_post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(int(job[SEM_POST]))
    for _ in helpers:
        sem_post(int(job[SEMAPHORE]))
    for helper in helpers:
        helper.join()


@functools.cache
def _threads(process_id: int, size: int) -> Threads:
    """Returns a process's threads; a forked child has none of its parent's."""
    return Threads(size)


def run(kernel: int, arguments: bytes, num_chunks: int) -> None:
    """Runs all parts of a kernel, on as many threads as torch uses now."""
    _threads(os.getpid(), torch.get_num_threads()).run(kernel, arguments, num_chunks)


def rows_per_chunk(x: torch.Tensor) -> int:
    """Returns how many rows of x [rows, ...] a part of a kernel that goes over rows shall have.

    Activations in half precision are multiplied by oneDNN on torch's threads: helpers would take
    the cores from these while they wait for one another.
    """
    num_rows = max(len(x), 1)
    if x.dtype != torch.float32:
        return num_rows
    return max(ELEMENTS_PER_CHUNK * num_rows // max(x.numel(), 1), 1)
