"""Offline throughput on random prompts: output tokens over the wall time of one `generate`.

Run: python bench.py --model DIR [--runs 3] [--json FILE]

The default workload is nano-vllm's: 256 prompts of 100 to 1024 random ids and 100 to 1024 output
tokens each, 142,827 and 133,966 in all. `--runs` repeats it with other ids of the same lengths, so
that the prefix cache cannot help.
"""

import argparse
import json
import os
import platform
import random
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config

MAX_DRAWN_ID = 10000
ENGINE_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kvcache_block_size",
    "num_kvcache_blocks",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
    "enable_prefix_caching",
    "async_scheduling",
    "attention_backend",
    "device",
    "dtype",
)
PACKAGES = ("nanovllm", "triton", "transformers")


def make_workload(
    num_seqs: int,
    input_lens: tuple[int, int],
    output_lens: tuple[int, int],
    *,
    vocab_size: int,
    seed: int,
    run: int = 0,
) -> list[tuple[list[int], int]]:
    """(prompt, max_tokens) of each request; lengths are drawn within the bounds, both included.

    Order of the draws: each prompt's length, then its ids; after all prompts every max_tokens; then
    the ids of run 1, run 2 and so on, in the lengths of run 0. An id is drawn in [0, 10000] and
    taken modulo `vocab_size`, so that the vocabulary does not change the draws, hence the lengths.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, MAX_DRAWN_ID) for _ in range(rng.randint(*input_lens))]
        for _ in range(num_seqs)
    ]
    max_tokens = [rng.randint(*output_lens) for _ in range(num_seqs)]
    for _ in range(run):
        prompts = [[rng.randint(0, MAX_DRAWN_ID) for _ in prompt] for prompt in prompts]
    prompts = [[token_id % vocab_size for token_id in prompt] for prompt in prompts]
    return list(zip(prompts, max_tokens, strict=True))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="~/huggingface/Qwen3-0.6B/", help="checkpoint directory")
    add("--num-seqs", type=int, default=256, help="requests in a run")
    add("--min-input-len", type=int, default=100, help="shortest prompt")
    add("--max-input-len", type=int, default=1024, help="longest prompt")
    add("--min-output-len", type=int, default=100, help="shortest completion")
    add("--max-output-len", type=int, default=1024, help="longest completion")
    add("--seed", type=int, default=0, help="of the workload and of the sampling noise")
    add("--temperature", type=float, default=0.6, help="sampling temperature")
    add("--runs", type=int, default=1, help="repeats, with other ids of the same lengths")
    add("--json", type=Path, metavar="FILE", help="where to write everything about this benchmark")
    defaults = {field.name: field.default for field in fields(Config)}
    engine = parser.add_argument_group("engine", "keywords of LLM")
    for name in ENGINE_OPTIONS:
        default: Any = defaults[name]
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        option = "--" + name.replace("_", "-")
        engine.add_argument(option, default=default, help=f"{name} of LLM", **kind)
    args = parser.parse_args(argv)
    for name in ("num_seqs", "runs", "min_input_len", "min_output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    for what in ("input", "output"):
        low, high = (getattr(args, f"{bound}_{what}_len") for bound in ("min", "max"))
        if low > high:
            parser.error(f"--min-{what}-len {low} exceeds --max-{what}-len {high}")
    return args


def run_once(llm: LLM, args: argparse.Namespace, run: int) -> dict[str, Any]:
    """One timed `generate`; prints its line and returns its figures and lengths."""
    workload = make_workload(
        args.num_seqs,
        (args.min_input_len, args.max_input_len),
        (args.min_output_len, args.max_output_len),
        vocab_size=llm.config.hf_config.vocab_size,
        seed=args.seed,
        run=run,
    )
    sampling_params = [
        SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True)
        for _, n in workload
    ]
    start = perf_counter()
    outputs = llm.generate([prompt for prompt, _ in workload], sampling_params, use_tqdm=False)
    seconds = perf_counter() - start
    input_lens = [len(prompt) for prompt, _ in workload]
    output_lens = [len(output["token_ids"]) for output in outputs]
    total = sum(output_lens)
    throughput = total / seconds
    print(f"Total: {total}tok, Time: {seconds:.2f}s, Throughput: {throughput:.2f}tok/s", flush=True)
    return {
        "input_tokens": sum(input_lens),
        "output_tokens": total,
        "seconds": seconds,
        "output_tokens_per_second": throughput,
        "input_lens": input_lens,
        "output_lens": output_lens,
    }


def describe(llm: LLM) -> dict[str, Any]:
    """The engine's configuration, the versions and the machine, ready for JSON."""
    config = {f.name: getattr(llm.config, f.name) for f in fields(Config) if f.name != "hf_config"}
    config["num_kvcache_blocks"] = llm.scheduler.block_manager.num_blocks  # measured, if it was -1
    versions = {name: version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}  # with its build
    return {
        "config": {k: str(v) if k.startswith("torch_") else v for k, v in config.items()},
        "versions": versions,
        "device_name": device_name(llm.config.torch_device),
        "num_cpus": os.cpu_count(),
        "num_torch_threads": torch.get_num_threads(),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # Linux; elsewhere platform knows
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    engine_options = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    start = perf_counter()
    try:
        llm = LLM(args.model, seed=args.seed, **engine_options)
    except ValueError as error:  # what the user can mend; the text says how
        sys.exit(f"error: {error}")
    construction = perf_counter() - start
    print(f"Construction: {construction:.2f}s", flush=True)
    with llm:
        warm_up = SamplingParams(temperature=args.temperature, max_tokens=8, ignore_eos=True)
        llm.generate([0], warm_up, use_tqdm=False)
        runs = [run_once(llm, args, run) for run in range(args.runs)]
        about = describe(llm)
    if args.json is not None:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        result = {"options": options, "construction_seconds": construction, "runs": runs, **about}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
