"""Times a job over a file beside `generate` on the same rows, in turns on one engine.

Run: python -m benchmarks.jobs --model DIR [--job many-short] [--scale 1] [--repeats 3]

The job reads its rows from a file of JSON Lines and writes its results to another, as
`python -m nanovllm.batch` does. Prints output tokens per second of each repeat, and the ratio of
the best of each. On a CPU these are seconds of CPU time, since other processes change the wall
time. The jobs are those of benchmarks/workloads.py, which explains --scale. The prefix cache is
off, as it would save later repeats the prefill.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from tqdm import tqdm

from benchmarks.workloads import JOBS
from nanovllm import SamplingParams
from nanovllm.batch.engines import LocalEngine
from nanovllm.batch.files import LineFile, open_source
from nanovllm.batch.job import Job, Summary
from nanovllm.batch.requests import PlainRows, SamplingDefaults
from nanovllm.batch.serving import serve
from nanovllm.report import device_name

COMMON: dict[str, Any] = {"temperature": 0.6, "ignore_eos": True}  # how all rows are sampled


def write_rows(path: Path, prompts: list[list[int]], lengths: list[int]) -> None:
    with path.open("w") as file:
        for prompt, length in zip(prompts, lengths, strict=True):
            row = {"prompt": prompt, "sampling_params": {"max_tokens": length}}
            file.write(json.dumps(row) + "\n")


def run_file(engine: LocalEngine, rows: Path, output: Path) -> int:
    """Runs the job and returns the number of output tokens."""
    output.unlink(missing_ok=True)
    lines, summary = LineFile(output), Summary()
    job = Job(lines, summary, None, tqdm(disable=True))
    form = PlainRows(SamplingDefaults(COMMON, seed=0))
    job.write(serve(enumerate(open_source(rows).rows(0)), form, engine, job.has_room))
    lines.close()
    return summary.num_tokens


def run_generate(engine: LocalEngine, prompts: list[list[int]], lengths: list[int]) -> int:
    params = [SamplingParams(max_tokens=n, seed=i, **COMMON) for i, n in enumerate(lengths)]
    outputs = engine.generate(list(prompts), params, use_tqdm=False)
    return sum(len(output["token_ids"]) for output in outputs)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--job", choices=list(JOBS), default="many-short")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    job = JOBS[args.job].scaled(args.scale)
    lengths = [length for _, length in job.lengths()]
    longest = job.prefix_len + job.own_lens[1] + job.output_lens[1] + 1
    keywords: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": args.max_num_seqs}
    engine = LocalEngine(
        {"model": args.model, "device": args.device, "enable_prefix_caching": False} | keywords
    )
    with engine, TemporaryDirectory() as folder:
        prompts = job.prompts(0, engine.config.hf_config.vocab_size)
        rows, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        write_rows(rows, prompts, lengths)
        device = device_name(engine.config.torch_device)
        is_cpu = engine.config.torch_device.type == "cpu"
        clock = process_time if is_cpu else perf_counter
        ways: dict[str, Callable[[], int]] = {
            "generate": lambda: run_generate(engine, prompts, lengths),
            "job": lambda: run_file(engine, rows, output),
        }
        print(f"{args.job}: {len(prompts)} rows, {sum(lengths)} output tokens, {device}")
        best = dict.fromkeys(ways, 0.0)
        for way in ways.values():
            way()  # warms up
        for _ in range(args.repeats):
            for name, way in ways.items():
                start = clock()
                rate = way() / (clock() - start)
                best[name] = max(best[name], rate)
                print(f"{name}: {rate:.0f} tok/s", flush=True)
        print(f"job / generate: {best['job'] / best['generate']:.3f}")


if __name__ == "__main__":
    main()
