"""Compares nanovllm with Hugging Face's `generate` on the CPU, in tokens per second.

Run: python -m benchmarks.cpu --model DIR [--batch 8] [--tokens 64] [--threads N] [--repeats 3]
OpenVINO GenAI joins with --openvino DIR, the same model and its tokenizers in OpenVINO's format:
    optimum-cli export openvino --model DIR --task text-generation-with-past OUT

Decode: a batch of chat prompts gets the same number of greedy tokens each, stop tokens ignored;
completion tokens over the wall time of the whole call. Prefill: one prompt of `--prefill` random
ids gets one token; prompt tokens over the wall time. All engines run in this process, on as many
threads and in turns, so that other load on the machine affects all. The best run of each counts.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from example import chat_prompt
from nanovllm import LLM, SamplingParams
from nanovllm.report import device_name

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain to a child why the sky is blue in the day and red in the evening.",
    "List three colours.",
    "Who wrote Pride and Prejudice, and what is the novel about?",
    "My bread comes out dense and flat, though the starter doubles in six hours and the dough "
    "rests overnight in the fridge. What should I change first?",
    "Describe how a bicycle stays upright.",
    "Plan a weekend in Rome for two people who like food more than museums.",
)

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts, new tokens -> completions


class HuggingFace:
    """Runs all prompts as one padded batch through `generate`."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
        self.model = loaded.to(dtype).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        completions: list[list[int]] = out[:, longest:].tolist()
        return completions


class NanoVLLM:
    """Runs without the prefix cache, which would skip the prefill from the second run on."""

    def __init__(self, model: str, dtype: str, batch: int) -> None:
        self.llm = LLM(
            model, device="cpu", dtype=dtype, max_num_seqs=batch, enable_prefix_caching=False
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [output["token_ids"] for output in outputs]


class OpenVINO:
    """Runs with continuous batching and without a prefix cache. `pip install openvino-genai`."""

    def __init__(self, model: str, num_threads: int) -> None:
        import openvino_genai

        self.genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        properties = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": "f32"}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", properties
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        import openvino

        config = self.genai.GenerationConfig()
        config.min_new_tokens = config.max_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        tensors = [openvino.Tensor(torch.tensor([prompt]).numpy()) for prompt in prompts]
        results = self.pipeline.generate(tensors, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]


def time_engines(
    engines: Mapping[str, Generate], prompts: list[list[int]], num_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Times the engines in turns, after a warm-up run of each; returns the seconds of each run."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(-1, repeats):
        for name, generate in engines.items():
            start = perf_counter()
            completions = generate(prompts, num_tokens)
            elapsed = perf_counter() - start
            assert [len(ids) for ids in completions] == [num_tokens] * len(prompts)
            if repeat >= 0:
                seconds[name].append(elapsed)
    return seconds


def report(what: str, num_tokens: int, seconds: dict[str, list[float]]) -> None:
    """Prints the tokens per second of each engine's best run, and ours, the last, over each."""
    rates = {name: num_tokens / min(runs) for name, runs in seconds.items()}
    line = ", ".join(f"{name} {rate:.1f} tok/s" for name, rate in rates.items())
    *peers, ours = rates.values()
    ratios = " and ".join(f"{ours / peer:.2f}" for peer in peers)
    print(f"{what}: {line}, ratio {ratios}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="checkpoint directory with a tokenizer")
    parser.add_argument("--openvino", help="directory of the model in OpenVINO's format")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--batch", type=int, default=8, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--prefill", type=int, default=512, help="prompt of the prefill, in tokens")
    parser.add_argument("--threads", type=int, help="of torch; without it, what torch takes")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each engine")
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    about = [
        device_name(torch.device("cpu")),
        f"threads {torch.get_num_threads()}",
        f"torch {torch.__version__}",
    ]
    print(*about, f"transformers {transformers.__version__}", args.dtype, sep=", ", flush=True)
    hugging_face = HuggingFace(args.model, getattr(torch, args.dtype))
    ours = NanoVLLM(args.model, args.dtype, args.batch)
    engines: dict[str, Generate] = {"transformers": hugging_face.generate}
    if args.openvino is not None:
        engines["openvino"] = OpenVINO(args.openvino, torch.get_num_threads()).generate
    engines["nanovllm"] = ours.generate
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(args.batch)]
    prompts = [list(tokenizer.encode(chat_prompt(tokenizer, text))) for text in questions]
    seconds = time_engines(engines, prompts, args.tokens, args.repeats)
    report(f"decode {args.batch} x {args.tokens}", args.batch * args.tokens, seconds)
    vocab_size = ours.llm.config.hf_config.vocab_size
    prompt = random.Random(0).choices(range(vocab_size), k=args.prefill)
    seconds = time_engines(engines, [prompt], 1, args.repeats)
    report(f"prefill {args.prefill}", args.prefill, seconds)


if __name__ == "__main__":
    main()
