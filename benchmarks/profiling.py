"""Where the time goes inside steps: a trace and table of a run, and what such tables are made of.

All of it through torch's profiler: kernels on a GPU, operators on the CPU. With several ranks it is
rank 0 that is shown; the kernels that sum over the ranks then include the wait for the others.
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

TOP = 12


class Activity(NamedTuple):
    """One kernel or copy on a GPU, or one operator call on the CPU; times in microseconds.

    own: without the operators that it called.
    """

    name: str
    start: float
    end: float
    own: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: what one kernel takes, per step or in all."""

    name: str
    ms: float
    calls: float


def profile_run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], path: Path
) -> None:
    """Profiles one `generate`: a Chrome trace to `path` (gzip if it ends with .gz), and a table."""
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
    """Time in which at least one activity runs: kernels may overlap, operators nest."""
    busy, until = 0.0, float("-inf")
    for activity in sorted(activities, key=lambda activity: activity.start):
        busy += max(activity.end - max(activity.start, until), 0.0)
        until = max(until, activity.end)
    return busy / 1e3


def rows_of(activities: Iterable[Activity], num_steps: int = 1) -> list[Row]:
    """Time and calls by name, per step, the largest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for activity in activities:
        times[activity.name].append(activity.own)
    rows = [
        Row(name, sum(own) / 1e3 / num_steps, len(own) / num_steps) for name, own in times.items()
    ]
    return sorted(rows, key=lambda row: -row.ms)


def print_rows(rows: Sequence[Row]) -> None:
    print("         ms    calls")
    for row in rows[:TOP]:
        print(f"  {row.ms:9.3f} {row.calls:8.1f}  {row.name[:90]}")
    if rest := rows[TOP:]:
        ms, calls = sum(row.ms for row in rest), sum(row.calls for row in rest)
        print(f"  {ms:9.3f} {calls:8.1f}  ({len(rest)} others)", flush=True)


def profiler_activities(device: torch.device, *, with_cpu: bool) -> list[ProfilerActivity]:
    if device.type != "cuda":
        return [ProfilerActivity.CPU]
    return [ProfilerActivity.CUDA] + [ProfilerActivity.CPU] * with_cpu


def recorded(profiler: Any, device: torch.device) -> Iterator[Activity]:
    is_cuda = device.type == "cuda"
    wanted = "CUDA" if is_cuda else "CPU"
    for event in profiler.events():
        if event.device_type.name == wanted and not getattr(event, "is_user_annotation", False):
            span = event.time_range
            own = span.elapsed_us() if is_cuda else event.self_cpu_time_total
            yield Activity(event.name, span.start, span.end, own)
