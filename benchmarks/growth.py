"""Measures whether the host's work per step grows with the number of waiting prompts or of K/V
blocks, and what it costs to queue a prompt.

Run: python -m benchmarks.growth

A step here is a `schedule` and a `postprocess` with made-up ids and no model. 64 requests of 300
prompt and 64 output tokens are resident. When one ends, another is admitted and a new one queued
(not timed), so prefills of one prompt and decodes alternate, and the queue keeps its length. The
result is the mean step of a round of 16, and of that the median over the rounds.

`LLMEngine.add_request`, in an engine with a tiny random model, queues a prompt: it checks, copies
and enqueues the ids. The mean includes the work of the garbage collector meanwhile.
"""

import argparse
import random
import tempfile
from array import array
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import mean, median
from time import perf_counter

from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence as Request

BLOCK_SIZE = 256
RESIDENTS, PROMPT_LEN, OUTPUT_LEN = 64, 300, 64
SMALL_POOL = RESIDENTS * -(-(PROMPT_LEN + OUTPUT_LEN) // BLOCK_SIZE)  # just holds all residents
HUGE_POOL = 10**6
SHORT_QUEUE, LONG_QUEUE = 10, 100_000
STEPS_PER_ROUND = 16
VOCAB_SIZE = 151_936
QUEUED_PROMPT_LEN = 500


class HostLoop:
    """A scheduler and block manager in a steady state, with about `num_waiting` requests queued."""

    def __init__(self, num_waiting: int, num_blocks: int) -> None:
        self.scheduler = Scheduler(
            BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True),
            max_num_seqs=RESIDENTS,
            max_num_batched_tokens=RESIDENTS * (PROMPT_LEN + 1),
            stop_token_ids=(),
            reserved_tokens=0,  # the small pool holds all residents, and no more
        )
        self._seq_ids = count()
        for index in range(RESIDENTS):  # of different lengths, to end one by one
            self._add(index + 1)
        self.step()  # admits all
        assert self.scheduler.num_residents == RESIDENTS - 1, "the first has ended"
        for _ in range(num_waiting):
            self._add(OUTPUT_LEN)
        for _ in range(4 * OUTPUT_LEN):
            self.step()

    def step(self) -> float:
        """Runs a step and queues a new request for each that ends; returns the step's seconds."""
        start = perf_counter()
        batch = self.scheduler.schedule()
        assert batch is not None
        ids = list(range(len(batch.sampled_seq_ids)))
        finished = self.scheduler.postprocess(batch, ids)
        seconds = perf_counter() - start
        for _ in finished:
            self._add(OUTPUT_LEN)
        return seconds

    def _add(self, output_len: int) -> None:
        """Queues a request of `PROMPT_LEN` ids and `output_len` output tokens."""
        seq_id = next(self._seq_ids)
        prompt = array("q", range(seq_id, seq_id + PROMPT_LEN))  # unlike all others: no prefix hits
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        self.scheduler.add(Request(seq_id, prompt, params, max_model_len=4096, seed=0))


def step_seconds(loops: Sequence[HostLoop], num_rounds: int) -> list[float]:
    """Returns seconds per step of each loop; rounds alternate, so all see the same machine."""
    rounds: list[list[float]] = [[] for _ in loops]
    for _ in range(num_rounds):
        for loop, times in zip(loops, rounds, strict=True):
            times.append(mean(loop.step() for _ in range(STEPS_PER_ROUND)))
    return [median(times) for times in rounds]


def add_request_seconds(num_prompts: int, num_batches: int = 100) -> tuple[float, float]:
    """Returns seconds per `add_request` of 500 ids: the mean and the median over `num_batches`."""
    rng = random.Random(0)
    distinct = [rng.choices(range(VOCAB_SIZE), k=QUEUED_PROMPT_LEN) for _ in range(1000)]
    prompts = [list(distinct[index % len(distinct)]) for index in range(num_prompts)]
    params = SamplingParams()
    size = -(-num_prompts // num_batches)
    times = []
    with tempfile.TemporaryDirectory() as directory:
        engine = tiny_engine(Path(directory))
        for first in range(0, num_prompts, size):
            batch = prompts[first : first + size]
            start = perf_counter()
            for prompt in batch:
                engine.add_request(prompt, params)
            times.append((perf_counter() - start) / len(batch))
        engine.exit()
    return mean(times), median(times)


def tiny_engine(directory: Path) -> LLMEngine:
    """Returns a CPU engine with a tiny random model of Qwen3's vocabulary, saved in `directory`."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(directory)
    weights = Qwen3ForCausalLM(config).state_dict()
    del weights["lm_head.weight"]  # tied
    save_file(weights, directory / "model.safetensors")
    return LLMEngine(
        str(directory), device="cpu", dtype="float32", max_num_seqs=1, max_model_len=1024
    )


def print_growth(
    what: str, sizes: tuple[int, int], loops: Sequence[HostLoop], num_rounds: int
) -> None:
    """Prints the seconds per step of two loops that differ in the number of `what`."""
    few, many = (seconds * 1e6 for seconds in step_seconds(loops, num_rounds))
    print(
        f"step with {sizes[0]:,} and {sizes[1]:,} {what}: {few:.1f}us and {many:.1f}us, "
        f"ratio {many / few:.2f}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Measure the growth of the host's work per step, and the cost of a request.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=200, help="of 16 steps, of each loop")
    parser.add_argument("--waiting", type=int, default=LONG_QUEUE, help="prompts in the long queue")
    parser.add_argument("--pool", type=int, default=HUGE_POOL, help="blocks in the huge pool")
    parser.add_argument("--prompts", type=int, default=100_000, help="prompts to queue")
    args = parser.parse_args(argv)
    small = HostLoop(SHORT_QUEUE, SMALL_POOL)
    queues, pools = (SHORT_QUEUE, args.waiting), (SMALL_POOL, args.pool)
    print_growth(
        "waiting prompts", queues, [small, HostLoop(args.waiting, SMALL_POOL)], args.rounds
    )
    print_growth("K/V blocks", pools, [small, HostLoop(SHORT_QUEUE, args.pool)], args.rounds)
    overall, typical = add_request_seconds(args.prompts)
    print(
        f"add_request of {QUEUED_PROMPT_LEN} ids, {args.prompts:,} times: {overall * 1e6:.1f}us, "
        f"median {typical * 1e6:.1f}us"
    )


if __name__ == "__main__":
    main()
