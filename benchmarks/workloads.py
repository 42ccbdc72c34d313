"""Times the jobs that offline users run, each beside its floor and other engines' figures.

Run: python -m benchmarks.workloads --model DIR [--jobs many-short,long] [--runs 2] [--scale 1]

Prints output tokens per second of each run, the phases of the last, and the rate at which its reads
and arithmetic alone would go on this device (benchmarks/roofline.py), a shared prefix read and
computed once. The runs of a job differ in the token ids, not in the lengths. --scale: multiplies
requests and lengths, for a small machine or model.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from benchmarks.phases import TimedLLM, print_phases, split
from benchmarks.roofline import Floor, Rates, Shape, floor, measure_rates, num_decode_steps
from nanovllm import SamplingParams
from nanovllm.config import Config

# Output tok/s on one H200 with the shape of Qwen3-0.6B: docs/benchmarks/2026-12-01.md.
PEERS = {
    "bench": {"nano-vllm": 20_080, "vLLM 0.24": 23_197},
    "many-short": {"nano-vllm": 47_972, "vLLM 0.24": 24_258},
    "classify": {"nano-vllm": 3_455, "vLLM 0.24": 3_992},
    "few-shot": {"nano-vllm": 14_332, "vLLM 0.24": 14_815},
    "alone": {"nano-vllm": 425, "vLLM 0.24": 574},
    "long": {"nano-vllm": 926, "vLLM 0.24": 1_177},
    "rollouts": {"nano-vllm": 36_736, "vLLM 0.24": 47_246},
}
MAX_DRAWN_ID = 10_000


@dataclass(frozen=True, slots=True)
class Job:
    """Requests of random lengths.

    own_lens, output_lens: bounds of what a prompt does not share, and of its completion.
    prefix_len, num_prefixes: tokens that prompts start with, and how many such prefixes there are;
        as many prompts share each.
    """

    num_requests: int
    own_lens: tuple[int, int]
    output_lens: tuple[int, int]
    prefix_len: int = 0
    num_prefixes: int = 0

    def scaled(self, scale: float) -> "Job":
        def of(number: int) -> int:
            return max(1, round(number * scale)) if number else 0

        def both(bounds: tuple[int, int]) -> tuple[int, int]:
            return of(bounds[0]), of(bounds[1])

        num_prefixes = of(self.num_prefixes)
        num_requests = of(self.num_requests) // max(num_prefixes, 1) * max(num_prefixes, 1)
        return replace(
            self,
            num_requests=max(num_requests, num_prefixes),
            own_lens=both(self.own_lens),
            output_lens=both(self.output_lens),
            prefix_len=of(self.prefix_len),
            num_prefixes=num_prefixes,
        )

    def lengths(self) -> list[tuple[int, int]]:
        """Returns (own tokens, output tokens) of each request, the same each time."""
        rng = random.Random(0)
        own = [rng.randint(*self.own_lens) for _ in range(self.num_requests)]
        return [(length, rng.randint(*self.output_lens)) for length in own]

    def prompts(self, run: int, vocab_size: int) -> list[list[int]]:
        rng, last = random.Random(1000 + run), min(MAX_DRAWN_ID, vocab_size - 1)

        def ids(length: int) -> list[int]:
            return [rng.randint(0, last) for _ in range(length)]

        prefixes = [ids(self.prefix_len) for _ in range(self.num_prefixes)] or [[]]
        each = self.num_requests // len(prefixes)
        return [prefixes[i // each] + ids(own) for i, (own, _) in enumerate(self.lengths())]

    def floor(self, shape: Shape, rates: Rates, max_num_seqs: int) -> Floor:
        """Returns the floor, every prefix computed once, and read once in each step."""
        lengths = self.lengths()
        own = floor(shape, lengths, rates, max_num_seqs)
        num_tokens = self.num_prefixes * self.prefix_len
        num_steps = num_decode_steps([output for _, output in lengths], max_num_seqs)
        kv_bytes = num_steps * num_tokens * shape.kv_bytes_per_token
        num_own = sum(length for length, _ in lengths)
        num_pairs = num_tokens * (self.prefix_len + 1) // 2 + self.prefix_len * num_own
        per_pair = 2 * shape.num_layers * shape.num_heads * shape.head_dim
        flops = 2 * (shape.layer_weights * num_tokens + per_pair * num_pairs)
        return replace(
            own,
            kv_bytes=own.kv_bytes + kv_bytes,
            prefill_flops=own.prefill_flops + flops,
            kv_seconds=own.kv_seconds + kv_bytes / rates.bandwidth,
            prefill_seconds=own.prefill_seconds + flops / rates.flops,
        )


JOBS = {
    "bench": Job(256, (100, 1024), (100, 1024)),
    "many-short": Job(3000, (32, 256), (32, 256)),
    "classify": Job(768, (1024, 2048), (8, 32)),
    "few-shot": Job(1024, (64, 64), (32, 96), prefix_len=2048, num_prefixes=1),
    "rollouts": Job(512, (0, 0), (512, 512), prefix_len=256, num_prefixes=64),
    "long": Job(24, (16_000, 16_000), (256, 256)),
    "alone": Job(1, (256, 256), (512, 512)),
}


def run_job(llm: TimedLLM, name: str, job: Job, rates: Rates, num_runs: int) -> list[float]:
    """Runs a job and prints its figures; returns the output tokens per second of each run."""
    output_lens = [output for _, output in job.lengths()]
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in output_lens]
    total, speeds = sum(output_lens), list[float]()
    seconds = 0.0
    for run in range(num_runs):
        prompts = job.prompts(run, llm.config.hf_config.vocab_size)
        llm.marks.clear()
        start = perf_counter()
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
        seconds = perf_counter() - start
        assert sum(len(output["token_ids"]) for output in outputs) == total
        speeds.append(total / seconds)
    least = job.floor(Shape.of(llm.config), rates, llm.config.max_num_seqs).seconds
    runs = ", ".join(f"{speed:.0f}" for speed in speeds)
    print(f"{name}: {runs} tok/s; floor {total / least:.0f} tok/s, {least / seconds:.0%} of it")
    peers = ", ".join(f"{peer} {speed}" for peer, speed in PEERS[name].items())
    print(f"  recorded on an H200, Qwen3-0.6B shape: {peers} tok/s")
    print_phases("  last run", split(llm.marks, seconds))
    return speeds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--jobs", default=",".join(JOBS), help="names, separated by commas")
    parser.add_argument("--runs", type=int, default=2, help="of each job")
    parser.add_argument("--scale", type=float, default=1.0, help="of requests and lengths")
    parser.add_argument("--max-model-len", type=int, default=20_000)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    args = parser.parse_args(argv)
    names = args.jobs.split(",")
    unknown = [name for name in names if name not in JOBS]
    if unknown:
        parser.error(f"unknown jobs {', '.join(unknown)}; there are {', '.join(JOBS)}")
    options = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs}
    config = Config.from_kwargs(args.model, **options)
    rates = measure_rates(config.torch_device, config.torch_dtype)  # before the engine fills it
    llm = TimedLLM(args.model, **options)
    with llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8), use_tqdm=False)
        for name in names:
            run_job(llm, name, JOBS[name].scaled(args.scale), rates, args.runs)


if __name__ == "__main__":
    main()
