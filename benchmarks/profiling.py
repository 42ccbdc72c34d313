"""Profiles a run with torch's profiler, and makes tables of time per kernel from such profiles.

On a GPU a table lists kernels, on the CPU operators. With several ranks it shows rank 0, whose
all-reduce kernels include the wait for the other ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams

MAX_ROWS = 12  # of a printed table; a last row sums up the rest


class Activity(NamedTuple):
    """One kernel or copy on a GPU, or one operator call on the CPU; times in microseconds.

    own: the time without that of operators which it called.
    """

    name: str
    start: float
    end: float
    own: float


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: the time and calls of one kernel, per step or in all."""

    name: str
    ms: float
    calls: float


def profile_run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], path: Path
) -> None:
    """Profiles one `generate`: writes a Chrome trace to `path` (.gz: gzip), prints a table."""
    device = llm.config.torch_device
    with profile(activities=profiler_activities(device, with_cpu=True)) as profiler:
        start = perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - start
    profiler.export_chrome_trace(str(path))
    activities = list(recorded(profiler, device))
    print(f"Profiled run: {seconds * 1e3:.1f}ms, busy {busy_ms(activities):.1f}ms; trace in {path}")
    print_rows(rows_of(activities))


def busy_ms(activities: Iterable[Activity]) -> float:
    """Returns the milliseconds in which an activity runs; kernels may overlap, operators nest."""
    busy, until = 0.0, float("-inf")
    for activity in sorted(activities, key=lambda activity: activity.start):
        busy += max(activity.end - max(activity.start, until), 0.0)
        until = max(until, activity.end)
    return busy / 1e3


def rows_of(activities: Iterable[Activity], num_steps: int = 1) -> list[Row]:
    """Returns the table's rows, one per name with time and calls per step, the longest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for activity in activities:
        times[activity.name].append(activity.own)
    rows = [
        Row(name, sum(own) / 1e3 / num_steps, len(own) / num_steps) for name, own in times.items()
    ]
    return sorted(rows, key=lambda row: -row.ms)


def print_rows(rows: Sequence[Row]) -> None:
    """Prints a table: its first rows, and the sum of the others."""
    print("         ms    calls")
    for row in rows[:MAX_ROWS]:
        print(f"  {row.ms:9.3f} {row.calls:8.1f}  {row.name[:90]}")
    if rest := rows[MAX_ROWS:]:
        ms, calls = sum(row.ms for row in rest), sum(row.calls for row in rest)
        print(f"  {ms:9.3f} {calls:8.1f}  ({len(rest)} others)", flush=True)


def profiler_activities(device: torch.device, *, with_cpu: bool) -> list[ProfilerActivity]:
    """Returns what the profiler should record: the device, and with_cpu the host's operators."""
    if device.type != "cuda":
        return [ProfilerActivity.CPU]
    return [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * with_cpu


def recorded(profiler: Any, device: torch.device) -> Iterator[Activity]:
    """Yields the activities of `device` from a finished profiler."""
    is_cuda = device.type == "cuda"
    wanted = "CUDA" if is_cuda else "CPU"
    for event in profiler.events():
        if event.device_type.name == wanted and not getattr(event, "is_user_annotation", False):
            span = event.time_range
            own = span.elapsed_us() if is_cuda else event.self_cpu_time_total
            yield Activity(event.name, span.start, span.end, own)
