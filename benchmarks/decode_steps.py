"""Times single decode steps of an engine, then runs them under the profiler."""

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch.profiler import profile

from benchmarks.profiling import (
    Activity,
    Row,
    busy_ms,
    print_rows,
    profiler_activities,
    recorded,
    rows_of,
)
from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import DecodePart, PrefillChunk, PrefillPart, RowInit, ScheduledBatch
from nanovllm.engine.executor import TensorParallelExecutor
from nanovllm.engine.model_runner import ModelRunner

# Batch size and mean context of decode steps in the course of bench.py's default workload.
DECODE_CASES = ((256, 632), (126, 1035), (37, 1450), (4, 1586))
WARM_UP_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 30, 5
MAX_STEPS = WARM_UP_STEPS + TIMED_STEPS  # the most without a reset; each adds a token


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The times of a decode step of `batch` sequences, with `context` tokens each on average.

    wall_ms: wall time per step with the host one step ahead, as in the engine.
    host_ms: the part of it that the host spends in a launch.
    busy_ms: time in which the device works (on the CPU: in which operators run), measured in
        separate steps under the profiler.
    """

    batch: int
    context: int
    wall_ms: float
    host_ms: float
    busy_ms: float
    kernels: list[Row]


def profile_decode(llm: LLM, temperature: float) -> list[DecodeStep]:
    """Measures each of `DECODE_CASES` that this engine can hold; prints and returns the results.

    The engine must have no requests. Its K/V is overwritten, so its prefix cache must not be used
    afterwards. All steps are timed before any is profiled, because launches stay slower once a
    profiler has run.
    """
    loops: list[_DecodeLoop] = []
    for batch, context in DECODE_CASES:
        if why := _why_skipped(llm, batch, context):
            print(f"Decode step, batch {batch}, mean context {context}: skipped, {why}")
        else:
            loops.append(_DecodeLoop(llm, batch, context, temperature))
    times = [loop.timed() for loop in loops]
    steps: list[DecodeStep] = []
    for loop, (wall_ms, host_ms) in zip(loops, times, strict=True):
        activities = loop.profiled()
        busy = busy_ms(activities) / PROFILED_STEPS
        kernels = rows_of(activities, PROFILED_STEPS)
        print(
            f"Decode step, batch {loop.batch}, mean context {loop.context}: wall {wall_ms:.3f}ms, "
            f"busy {busy:.3f}ms, launch {host_ms:.3f}ms"
        )
        print_rows(kernels)
        steps.append(DecodeStep(loop.batch, loop.context, wall_ms, host_ms, busy, kernels))
    return steps


def context_lens(batch: int, mean: int) -> np.ndarray:
    """Returns context lengths with the given mean, int64 [batch], in the scheduler's order.

    They fall evenly from 1.5 to 0.5 times the mean. Batches of up to 4, which end a run, get equal
    lengths.
    """
    if batch <= 4:
        return np.full(batch, mean)
    return np.linspace(1.5 * mean, 0.5 * mean, batch).round().astype(np.int64)


def _why_skipped(llm: LLM, batch: int, context: int) -> str | None:
    """Returns the reason why this engine cannot run the case, None if it can."""
    config = llm.config
    if batch > config.max_num_seqs:
        return f"max_num_seqs is {config.max_num_seqs}"
    longest = int(context_lens(batch, context).max()) + MAX_STEPS
    if longest > config.max_model_len:
        return f"its longest takes {longest} tokens, max_model_len is {config.max_model_len}"
    need, have = batch * _blocks_for(llm, longest), llm.scheduler.block_manager.num_blocks
    return f"it takes {need} blocks, the pool has {have}" if need > have else None


def _blocks_for(llm: LLM, num_tokens: int) -> int:
    """Returns the K/V blocks that a sequence of `num_tokens` tokens takes."""
    return -(-num_tokens // llm.config.kvcache_block_size)


class _DecodeLoop:
    """Runs decode steps of rows 0 to `batch` - 1 with no scheduler: the host names the rows."""

    def __init__(self, llm: LLM, batch: int, context: int, temperature: float) -> None:
        self.batch, self.context = batch, context
        self.device = llm.config.torch_device
        self._runner = llm._check_open()
        lens = context_lens(batch, context).tolist()
        longest = max(lens) + MAX_STEPS
        width = _blocks_for(llm, longest)
        tables = np.random.default_rng(0).permutation(batch * width).reshape(batch, width).tolist()
        self._num_blocks = batch * width
        rows, params = list(range(batch)), SamplingParams(temperature=temperature)
        chunks = [
            PrefillChunk(num - 1, [0], True, False, RowInit(params, row, table))
            for row, num, table in zip(rows, lens, tables, strict=True)
        ]
        self._start = ScheduledBatch(prefill=PrefillPart(rows, rows, chunks, max(lens)))
        self._batch = ScheduledBatch(DecodePart(rows, rows, [], longest))

    def reset(self) -> None:
        """Puts the rows into the state after a prefill, of which only the last token is computed.

        Their blocks are scattered over the start of the pool, which is filled with random K/V,
        because zeros would run faster than data.
        """
        self.synchronize()
        with torch.inference_mode():
            for layer in self._local_runner().model.attention_layers:
                for pool in layer.cache:
                    used = pool[: self._num_blocks]
                    used.random_() if pool.dtype == torch.uint8 else used.normal_()
                if layer.cache.scales is not None:  # numbers up to 252 / 128
                    layer.cache.scales[: self._num_blocks] = 2.0**-7
        self.synchronize()
        self._runner.launch(self._start).token_ids()

    def _local_runner(self) -> ModelRunner:
        """Returns this process's runner; the K/V of other ranks is not filled."""
        runner = self._runner
        if isinstance(runner, TensorParallelExecutor):
            assert runner._ranks.runner is not None
            return runner._ranks.runner
        return runner

    def run(self, num_steps: int) -> float:
        """Runs steps with the host one ahead; returns the seconds spent in launches."""
        launching, handle = 0.0, None
        for _ in range(num_steps):
            start = perf_counter()
            launched = self._runner.launch(self._batch)
            launching += perf_counter() - start
            if handle is not None:
                handle.token_ids()
            handle = launched
        if handle is not None:
            handle.token_ids()
        return launching

    def timed(self) -> tuple[float, float]:
        """Returns milliseconds per step: the wall time, and the part of it spent in the launch."""
        self.reset()
        self.run(WARM_UP_STEPS)
        start = perf_counter()
        launching = self.run(TIMED_STEPS)
        return (perf_counter() - start) / TIMED_STEPS * 1e3, launching / TIMED_STEPS * 1e3

    def profiled(self) -> list[Activity]:
        """Returns what the profiler recorded during `PROFILED_STEPS` steps."""
        self.reset()
        with profile(activities=profiler_activities(self.device, with_cpu=False)) as profiler:
            self.run(PROFILED_STEPS)
            self.synchronize()
        return list(recorded(profiler, self.device))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
