"""Splits the wall time of a run into prefill, and decode by batch size."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypedDict

from nanovllm import LLM
from nanovllm.engine.batch import ScheduledBatch

BAND_ENDS = (4, 16, 64, 128, 256)  # 1-4, 5-16, ..., >256


class Mark(NamedTuple):
    """A time at which `_step` returned; the first mark is the time of its first call.

    num_prefilled, num_decoded: prompt tokens and sequences of the step that completed then; both
        are 0 if none did.
    """

    time: float
    num_prefilled: int = 0
    num_decoded: int = 0


class Band(TypedDict):
    """The decode steps within a range of batch sizes."""

    batch: str
    steps: int
    mean_ms: float


class Phases(TypedDict):
    """A run's wall time, split; `other` is the time before the first step and after the last.

    A step that computes prompt tokens counts as prefill, whether or not it decodes as well.
    """

    prefill_seconds: float
    prefill_steps: int
    decode_seconds: float
    decode_steps: int
    other_seconds: float
    decode_bands: list[Band]


class TimedLLM(LLM):
    """An `LLM` that also appends the completion of each step to `marks`."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.marks: list[Mark] = []

    def _step(self) -> ScheduledBatch | None:
        if not self.marks:
            self.marks.append(Mark(perf_counter()))
        batch = super()._step()
        counts = (batch.num_prefilled, batch.num_decoded) if batch else (0, 0)
        self.marks.append(Mark(perf_counter(), *counts))
        return batch


def split(marks: Sequence[Mark], seconds: float) -> Phases:
    """Returns how a run of `seconds` divides into steps, given its marks.

    A step's time counts from the completion of the step before it, because the host runs ahead of
    the device: meanwhile the device works on the step, or waits for the host to launch it.
    """
    prefill: list[float] = []
    decode: list[tuple[int, float]] = []  # batch size, seconds
    previous = marks[0].time
    for time, num_prefilled, num_decoded in marks[1:]:
        if num_prefilled:
            prefill.append(time - previous)
        elif num_decoded:
            decode.append((num_decoded, time - previous))
        if num_prefilled or num_decoded:
            previous = time
    decode_seconds = sum(step for _, step in decode)
    return {
        "prefill_seconds": sum(prefill),
        "prefill_steps": len(prefill),
        "decode_seconds": decode_seconds,
        "decode_steps": len(decode),
        "other_seconds": seconds - sum(prefill) - decode_seconds,
        "decode_bands": _bands(decode),
    }


def _bands(decode: Sequence[tuple[int, float]]) -> list[Band]:
    """Groups decode steps, (batch size, seconds) each, by batch size; leaves out empty bands."""
    bands: list[Band] = []
    low = 1
    for high in (*BAND_ENDS, None):
        times = [t for batch, t in decode if low <= batch and (high is None or batch <= high)]
        if times:
            name = f">{low - 1}" if high is None else f"{low}-{high}"
            mean_ms = sum(times) / len(times) * 1e3
            bands.append({"batch": name, "steps": len(times), "mean_ms": mean_ms})
        low = (high or 0) + 1
    return bands


def print_phases(name: str, phases: Phases) -> None:
    """Prints a run's phases and a table of its decode bands."""
    print(
        f"{name}: prefill {phases['prefill_seconds']:.3f}s in {phases['prefill_steps']} steps, "
        f"decode {phases['decode_seconds']:.3f}s in {phases['decode_steps']}, "
        f"other {phases['other_seconds']:.3f}s"
    )
    print("  decode batch    steps   mean ms   seconds")
    for band in phases["decode_bands"]:
        seconds = band["steps"] * band["mean_ms"] / 1e3
        print(f"  {band['batch']:>12} {band['steps']:8} {band['mean_ms']:9.3f} {seconds:9.3f}")
