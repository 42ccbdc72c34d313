"""Measures offline throughput on random prompts: output tokens over the wall time of `generate`.

Run: python bench.py --model DIR [--runs 3] [--top-p 0.9] [--roofline] [--profile FILE]
     [--profile-decode] [--json FILE]

The default workload is nano-vllm's: 256 prompts of 100 to 1024 random ids and 100 to 1024 output
tokens each, 142,827 and 133,966 in all. `--runs` repeats it with other ids of the same lengths, so
that the prefix cache cannot help. Without `--model`, on a machine without a GPU, a small workload
runs on the demo model instead.

--roofline: prints each run's time in prefill, and in decode by batch size, beside the least time
    that its reads and arithmetic can take at the measured rates of a copy and of a matmul.
--profile: profiles one more, short run: writes a Chrome trace and prints a table of kernels.
--profile-decode: prints tables of single decode steps, at batch sizes of the default workload.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks import roofline
from benchmarks.decode_steps import profile_decode
from benchmarks.environment import describe
from benchmarks.phases import TimedLLM, print_phases, split
from benchmarks.profiling import profile_run
from nanovllm import SamplingParams
from nanovllm.config import Config

MAX_DRAWN_ID = 10000
ENGINE_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kvcache_block_size",
    "num_kvcache_blocks",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
    "autotune_matmul",
    "enable_prefix_caching",
    "async_scheduling",
    "attention_backend",
    "device",
    "dtype",
)
SAMPLING_OPTIONS: dict[str, float | None] = {
    "temperature": 0.6,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
}
DEFAULTS = {
    "model": "~/huggingface/Qwen3-0.6B/",
    "num_seqs": 256,
    "min_input_len": 100,
    "max_input_len": 1024,
    "min_output_len": 100,
    "max_output_len": 1024,
}
DEMO_DEFAULTS = {
    "model": str(Path(__file__).parent / "demo" / "austen"),
    "num_seqs": 16,
    "min_input_len": 16,
    "max_input_len": 128,
    "min_output_len": 16,
    "max_output_len": 128,
    "max_model_len": 1024,
}
PROFILED_OUTPUT_LEN = 16  # a profiled run is short: a trace of all steps would be unwieldy


def make_workload(
    num_seqs: int,
    input_lens: tuple[int, int],
    output_lens: tuple[int, int],
    *,
    vocab_size: int,
    seed: int,
    run: int = 0,
) -> list[tuple[list[int], int]]:
    """Returns (prompt, max_tokens) of each request, with lengths within the inclusive bounds.

    Order of the draws: each prompt's length and then its ids; after all prompts every max_tokens;
    then the ids of run 1, run 2 and so on, with the lengths of run 0. An id is drawn in [0, 10000]
    and taken modulo `vocab_size`, so that the vocabulary changes neither the draws nor the lengths.
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
    """Parses the options, with a small workload on the demo model as defaults without a GPU.

    Exits with an error message for an impossible workload or output path.
    """
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="checkpoint directory")
    add("--num-seqs", type=int, help="requests in a run")
    add("--min-input-len", type=int, help="shortest prompt")
    add("--max-input-len", type=int, help="longest prompt")
    add("--min-output-len", type=int, help="shortest completion")
    add("--max-output-len", type=int, help="longest completion")
    add("--seed", type=int, default=0, help="of the workload and of the sampling noise")
    for name, value in SAMPLING_OPTIONS.items():
        number = int if name in ("top_k", "logprobs", "prompt_logprobs") else float
        add("--" + name.replace("_", "-"), type=number, default=value, help="of SamplingParams")
    add("--runs", type=int, default=1, help="repeats, with other ids of the same lengths")
    add("--json", type=Path, metavar="FILE", help="where to write everything about this benchmark")
    add("--roofline", action="store_true", help="measure this device, print the workload's floor")
    add("--profile", type=Path, metavar="FILE", help="where to write a trace; .gz compresses it")
    add("--profile-decode", action="store_true", help="print the kernels of decode steps")
    defaults = {field.name: field.default for field in fields(Config)}
    engine = parser.add_argument_group("engine", "keywords of LLM")
    for name in ENGINE_OPTIONS:
        default: Any = defaults[name]
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, bool) or name == "async_scheduling":
            kind = {"action": argparse.BooleanOptionalAction}
        option = "--" + name.replace("_", "-")
        engine.add_argument(option, default=default, help=f"{name} of LLM", **kind)
    is_demo = not torch.cuda.is_available() and not any(
        arg.split("=")[0] == "--model" for arg in (sys.argv[1:] if argv is None else argv)
    )
    parser.set_defaults(**(DEMO_DEFAULTS if is_demo else DEFAULTS))
    args = parser.parse_args(argv)
    for name in ("num_seqs", "runs", "min_input_len", "min_output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    for what in ("input", "output"):
        low, high = (getattr(args, f"{bound}_{what}_len") for bound in ("min", "max"))
        if low > high:
            parser.error(f"--min-{what}-len {low} exceeds --max-{what}-len {high}")
    try:
        sampling_params(args, max_tokens=1)
    except ValueError as error:
        parser.error(f"--{str(error).replace('_', '-')}")
    for name in ("json", "profile"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name} {path}: there is no directory {path.parent}")
    return args


def make_requests(
    vocab_size: int, args: argparse.Namespace, run: int, max_output_len: int | None = None
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns a run's prompts and sampling parameters; `max_output_len` caps its max_tokens."""
    workload = make_workload(
        args.num_seqs,
        (args.min_input_len, args.max_input_len),
        (args.min_output_len, args.max_output_len),
        vocab_size=vocab_size,
        seed=args.seed,
        run=run,
    )
    output_lens = [min(n, max_output_len or n) for _, n in workload]
    return [prompt for prompt, _ in workload], [
        sampling_params(args, max_tokens=n) for n in output_lens
    ]


def sampling_params(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    """Returns the parameters of a request that ends by its length."""
    options: dict[str, Any] = {name: getattr(args, name) for name in SAMPLING_OPTIONS}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def run_once(llm: TimedLLM, args: argparse.Namespace, run: int) -> dict[str, Any]:
    """Times one `generate`; prints its throughput and returns its figures, phases and lengths."""
    prompts, sampling_params = make_requests(llm.config.hf_config.vocab_size, args, run)
    llm.marks.clear()
    start = perf_counter()
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    seconds = perf_counter() - start
    input_lens = [len(prompt) for prompt in prompts]
    output_lens = [len(output["token_ids"]) for output in outputs]
    total = sum(output_lens)
    throughput = total / seconds
    print(f"Total: {total}tok, Time: {seconds:.2f}s, Throughput: {throughput:.2f}tok/s", flush=True)
    return {
        "input_tokens": sum(input_lens),
        "output_tokens": total,
        "seconds": seconds,
        "output_tokens_per_second": throughput,
        "phases": split(llm.marks, seconds),
        "input_lens": input_lens,
        "output_lens": output_lens,
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    engine_options = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    try:
        rates = None
        if args.roofline:  # before the engine fills the device
            config = Config.from_kwargs(args.model, **engine_options)
            rates = roofline.measure_rates(config.torch_device, config.torch_dtype)
        start = perf_counter()
        llm = TimedLLM(args.model, seed=args.seed, **engine_options)
    except ValueError as error:  # the user can fix it; the message says how
        sys.exit(f"error: {error}")
    construction = perf_counter() - start
    print(f"Construction: {construction:.2f}s", flush=True)
    with llm:
        llm.generate([0], sampling_params(args, max_tokens=8), use_tqdm=False)
        runs = [run_once(llm, args, run) for run in range(args.runs)]
        result = {"construction_seconds": construction, "runs": runs, **describe(llm)}
        if args.profile_decode:
            steps = profile_decode(llm, args.temperature)
            result["decode_steps"] = [asdict(step) for step in steps]
        if args.profile is not None:
            vocab_size = llm.config.hf_config.vocab_size
            requests = make_requests(vocab_size, args, args.runs, PROFILED_OUTPUT_LEN)
            profile_run(llm, *requests, args.profile)
    if rates is not None:
        for index, run in enumerate(runs):
            print_phases(f"Run {index}", run["phases"])
        shape = roofline.Shape.of(llm.config)
        result["roofline"] = roofline.report(shape, runs, llm.config, rates)
    if args.json is not None:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        args.json.write_text(json.dumps({"options": options, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
