"""Runs everything mixed for a long time, and checks that neither memory nor speed changes.

Run: python -m benchmarks.soak [--minutes 30] [--model DIR] [--device cuda] [--large]

A round is a fixed set of calls: batches of plain, filtered, penalised and reported requests,
samples, streams that are closed halfway, aborts, errors of the caller, new weights, and a second
engine that comes and goes. Each line of the table is the state after a twentieth of the time. It
ends with exit code 1 if memory, file descriptors or threads have grown after the first quarter, or
if the last quarter was slower: by the processor time of this process on a CPU, which other programs
change little, and by the clock on a GPU.

`--large` begins with single calls of extreme sizes.
"""

import argparse
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time
from typing import Any

import psutil
import torch

from nanovllm import LLM, SamplingParams

MIB = 2**20
DEMO_MODEL = Path(__file__).parents[1] / "demo" / "austen"
NUM_LINES = 20
MAX_GROWTH_MIB = 64  # of the process, whose allocators keep some of what was freed
MIN_SPEED = 0.75  # of the last quarter's rounds, beside those of the second
HEADER = ("minutes", "rounds", "tokens/s", "RSS MiB", "GPU MiB", "files", "threads", "objects")


@dataclass(frozen=True, slots=True)
class State:
    """What a process holds, and how fast it was since the last state."""

    minutes: float
    rounds: int
    tokens_per_second: float
    rss_mib: float
    gpu_mib: float
    num_files: int
    num_threads: int
    num_objects: int

    def __str__(self) -> str:
        return " ".join(
            f"{value:>10.1f}" if isinstance(value, float) else f"{value:>10}"
            for value in astuple(self)
        )


class Soak:
    """An engine, and rounds of work for it."""

    def __init__(self, model: str, device: str) -> None:
        self.model = model
        self.config: dict[str, Any] = {
            "device": device,
            "max_model_len": 512,
            "kvcache_block_size": 32,
            "num_kvcache_blocks": 40,  # so few that requests are preempted
            "max_num_seqs": 32,
        }
        self.llm = LLM(model, **self.config)
        self.num_rounds = 0
        self._rng = random.Random(0)
        self._vocab_size = self.llm.config.hf_config.vocab_size

    def round(self) -> int:
        """Does all kinds of work once; returns how many tokens were sampled."""
        before = self.llm.metrics()["tokens"]["completion"]
        self._batches()
        self._streams()
        self._steps()
        self._errors()
        if self.num_rounds % 4 == 0:
            self.llm.update_weights(self.model)
            self.llm.reset_prefix_cache()
        if self.num_rounds % 16 == 0:
            with LLM(self.model, **self.config) as second:
                second.generate(self._prompts(4, 40), self._params(8), use_tqdm=False)
        self.num_rounds += 1
        return self.llm.metrics()["tokens"]["completion"] - before

    def _prompts(self, num: int, length: int) -> list[list[int]]:
        shared = self._ids(length // 2)
        return [shared + self._ids(self._rng.randint(1, length // 2)) for _ in range(num)]

    def _ids(self, num: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(num)]

    def _params(self, max_tokens: int, **wanted: object) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **wanted)  # type: ignore[arg-type]

    def _batches(self) -> None:
        kinds = [
            self._params(200),
            self._params(40, temperature=0),
            self._params(30, top_k=20, top_p=0.9),
            self._params(20, presence_penalty=1.0, logprobs=2),
            self._params(20, n=3, min_p=0.05),
            self._params(10, prompt_logprobs=1, stop_token_ids=self._ids(50)),
        ]
        params = [kinds[i % len(kinds)] for i in range(48)]
        outputs = self.llm.generate(self._prompts(48, 120), params, use_tqdm=False)
        assert all(output["token_ids"] for output in outputs)

    def _streams(self) -> None:
        halfway = self.llm.stream(self._prompts(6, 60), self._params(30))
        for _ in range(20):
            next(halfway)
        for _ in self.llm.stream(self._prompts(3, 60), self._params(15)):
            pass
        halfway.close()

    def _steps(self) -> None:
        ids = [self.llm.add_request(p, self._params(20)) for p in self._prompts(8, 80)]
        for seq_id in ids[::2]:
            self.llm.step()
            self.llm.abort(seq_id)
        num_ended = 0
        while not self.llm.is_finished():
            num_ended += len(self.llm.step()[0])
        assert num_ended == len(ids) // 2

    def _errors(self) -> None:
        """Mistakes of a caller, and an exception in the midst of steps."""
        mistakes: list[Callable[[], object]] = [
            lambda: self.llm.generate([[1], []], use_tqdm=False),
            lambda: self.llm.add_request([self._vocab_size], SamplingParams()),
            lambda: self.llm.update_weights([("nothing", torch.zeros(1))]),
        ]
        for mistake in mistakes:
            try:
                mistake()
            except ValueError:
                continue
            raise AssertionError("a mistake was accepted")
        try:
            for _ in self.llm.stream(self._prompts(4, 60), self._params(20)):
                raise KeyError("the caller's own")
        except KeyError:
            gc.collect()  # the stream that nobody has closed


def large_calls(soak: Soak, scale: float = 1) -> None:
    """Makes calls of extreme sizes, times `scale`; each must return everything."""
    ids, one = soak._ids, SamplingParams(max_tokens=1, temperature=0)
    longest = soak.config["max_model_len"] - 1
    shared = ids(320)
    cases = {
        "of 3 tokens": [ids(3) for _ in range(int(100_000 * scale))],
        "that share 320 tokens": [shared + ids(4) for _ in range(int(10_000 * scale))],
        "of one token": [ids(1) for _ in range(int(2_000 * scale))],
        f"of {longest} tokens": [ids(longest) for _ in range(int(200 * scale))],
    }
    for name, prompts in cases.items():
        start = perf_counter()
        outputs = soak.llm.generate(prompts, one, use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [1] * len(prompts)
        assert [output["prompt_token_ids"] for output in outputs] == prompts
        print(f"{len(prompts):,} prompts {name}: {perf_counter() - start:.1f} s", flush=True)
    many = int(70_000 * scale)
    sizes = {"max_num_seqs": many, "max_model_len": 4, "kvcache_block_size": 4}
    sizes["num_kvcache_blocks"] = 9 * many  # with the reserve for 32 more tokens of each
    sizes["max_num_batched_tokens"] = 2 * many  # all prompts in one step
    with LLM(soak.model, device=soak.config["device"], **sizes) as llm:
        start, peak = perf_counter(), 0
        for _ in range(many):
            llm.add_request(ids(2), SamplingParams(max_tokens=2, ignore_eos=True))
        while not llm.is_finished():
            llm.step()
            peak = max(peak, llm.scheduler.num_residents)
        print(f"{many:,} requests, {peak:,} resident: {perf_counter() - start:.1f} s", flush=True)


def run(soak: Soak, minutes: float) -> list[State]:
    """Works for so long; prints and returns the states after each part of the time."""
    clock = process_time if soak.llm.config.torch_device.type == "cpu" else perf_counter
    states: list[State] = []
    start, process = monotonic(), psutil.Process()
    print(" ".join(f"{name:>10}" for name in HEADER))
    for line in range(1, NUM_LINES + 1):
        end = start + 60 * minutes * line / NUM_LINES
        num_tokens, seconds, is_first = 0, 0.0, True
        while is_first or monotonic() < end:
            begin = clock()
            num_tokens += soak.round()
            seconds += clock() - begin
            is_first = False
        gc.collect()
        has_gpu = torch.cuda.is_initialized()
        states.append(
            State(
                (monotonic() - start) / 60,
                soak.num_rounds,
                num_tokens / seconds,
                process.memory_info().rss / MIB,
                torch.cuda.memory_reserved() / MIB if has_gpu else 0.0,
                len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
                threading.active_count(),
                len(gc.get_objects()),
            )
        )
        print(states[-1], flush=True)
    return states


def findings(states: Sequence[State]) -> list[str]:
    """Returns what has grown or slowed down after the first quarter of the states."""
    quarter = max(len(states) // 4, 1)
    early, late = states[quarter : 2 * quarter], states[-quarter:]

    def typical(name: str, some: Sequence[State]) -> float:
        return float(median(getattr(state, name) for state in some))

    found = []
    for name, most in (
        ("rss_mib", MAX_GROWTH_MIB), ("gpu_mib", 2), ("num_files", 0), ("num_threads", 0),
        ("num_objects", 2000),
    ):  # fmt: skip
        growth = typical(name, late) - typical(name, early)
        if growth > most:
            found.append(f"{name} has grown by {growth:.1f}")
    name = "tokens_per_second"
    ratio = typical(name, late) / typical(name, early)
    if ratio < MIN_SPEED:
        found.append(f"the speed is {ratio:.2f} times what it was")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="default: the demo model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--large", action="store_true", help="begin with extremely large calls")
    args = parser.parse_args(argv)
    soak = Soak(args.model, args.device)
    if args.large:
        large_calls(soak)
    found = findings(run(soak, args.minutes))
    soak.llm.exit()
    print("\n".join(found) or "memory and speed stayed as they were")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
