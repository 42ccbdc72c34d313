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
from numba import njit, types

from nanovllm.kernels.cpu.atomics import add, call, exchange, pause, read, write
from nanovllm.kernels.cpu.compile import function_of
from nanovllm.utils.cpu_features import has_onednn

# Of a job, what changes often in cache lines of their own: parts not taken, parts done, the kernel,
# its arguments, how many helpers sleep, whether they shall end, then C functions and a semaphore.
REMAINING, DONE, KERNEL, ARGUMENTS, NUM_ASLEEP, HAS_ENDED = 0, 8, 16, 17, 24, 25
YIELD, SEM_WAIT, SEM_POST, SEMAPHORE, SEMAPHORE_DATA = 32, 33, 34, 35, 40
JOB_SIZE = 48
ELEMENTS_PER_CHUNK = 1 << 14  # some 5 microseconds
SPINS = 10_000  # until a helper sleeps, some 0.2 ms
SPINS_TO_YIELD = 200  # until another thread that waits for this core gets it


@njit
def _wait(job, spins):
    """Waits a moment; now and then it offers this core to other threads."""
    pause()
    if spins % SPINS_TO_YIELD == 0:
        call(job[YIELD], 0, 0)


@njit
def _take_parts(job):
    """Does parts of the current job until all are taken."""
    while True:
        chunk = add(job, REMAINING, -1) - 1
        if chunk < 0:
            return
        # Whoever has a part keeps the job from ending, so these stay as they are.
        call(job[KERNEL], job[ARGUMENTS], chunk)
        add(job, DONE, 1)


def _run(job, kernel, arguments, num_chunks):
    """Does a job together with the helpers; returns when all parts are done."""
    job[KERNEL] = kernel
    job[ARGUMENTS] = arguments
    write(job, DONE, 0)
    write(job, REMAINING, num_chunks)
    # A helper that falls asleep right now misses this job and is woken for the next one.
    for _ in range(exchange(job, NUM_ASLEEP, 0) if read(job, NUM_ASLEEP) else 0):
        call(job[SEM_POST], job[SEMAPHORE], 0)
    _take_parts(job)
    spins = 0
    while read(job, DONE) < num_chunks:
        spins += 1
        _wait(job, spins)


def _run_alone(kernel, arguments, num_chunks):
    """Does all parts on this thread."""
    for chunk in range(num_chunks):
        call(kernel, arguments, chunk)


def _help(job):
    """Does parts of jobs until the helpers shall end; sleeps after `SPINS` without a job."""
    spins = 0
    while not read(job, HAS_ENDED):
        if read(job, REMAINING) > 0:
            _take_parts(job)
            spins = 0
        elif spins < SPINS:
            spins += 1
            _wait(job, spins)
        else:
            add(job, NUM_ASLEEP, 1)
            call(job[SEM_WAIT], job[SEMAPHORE], 0)
            spins = 0


@functools.cache
def compile_threads() -> tuple[int, int, int]:
    """Returns the addresses of `_run_alone`, `_run` and `_help`; compiles them if need be."""
    index, job = types.int64, types.CPointer(types.int64)
    return (
        function_of(_run_alone, index, index, index),
        function_of(_run, job, index, index, index),
        function_of(_help, job),
    )


class Threads:
    """The calling thread and `size` - 1 helpers, which never need Python's lock."""

    def __init__(self, size: int) -> None:
        run_alone, run_together, help_ = compile_threads()
        # torch aligns it to a cache line; as an array it does not care about inference mode.
        self._job = torch.zeros(JOB_SIZE, dtype=torch.int64).numpy()
        self._address = self._job.ctypes.data
        self._lock = threading.Lock()
        in_c, pointer = ctypes.c_int64, ctypes.c_void_p
        self._run_alone = ctypes.CFUNCTYPE(None, in_c, pointer, in_c)(run_alone)
        self._run = ctypes.CFUNCTYPE(None, pointer, in_c, pointer, in_c)(run_together)
        if size > 1 and not _prepare(self._job):
            size = 1
        target = ctypes.CFUNCTYPE(None, pointer)(help_)
        self._helpers = [
            threading.Thread(target=target, args=(self._address,), daemon=True)
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


def uses_own_threads(dtype: torch.dtype) -> bool:
    """Returns whether activations in `dtype` are multiplied here, not by torch.

    Torch's threads wait for one another, and helpers would take their cores meanwhile.
    """
    return dtype == torch.float32 and has_onednn()


def rows_per_chunk(x: torch.Tensor) -> int:
    """Returns how many rows of x [rows, ...] a part of a kernel that goes over rows shall have."""
    num_rows = max(len(x), 1)
    if not uses_own_threads(x.dtype):
        return num_rows
    return max(ELEMENTS_PER_CHUNK * num_rows // max(x.numel(), 1), 1)
