"""The least time that a workload can take on a device, from two rates measured on it.

Decode is bound by what it must read: the K/V of every context token at every step, and all weights
of matrix products once a step; prefill by its arithmetic. The rest (biases, norms, the embedding
gather, writes, the sampler) is left out, and so is what a pool too small for all rows would cost.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.models.decoder import resolve_head_dim

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a dense decoder with a gated MLP decides about bytes and arithmetic."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    itemsize: int  # bytes of a weight, and of an element of K or V

    @classmethod
    def of(cls, config: Config) -> "Shape":
        hf_config = config.hf_config
        return cls(
            num_layers=hf_config.num_hidden_layers,
            hidden_size=hf_config.hidden_size,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=resolve_head_dim(hf_config),
            intermediate_size=hf_config.intermediate_size,
            vocab_size=hf_config.vocab_size,
            itemsize=config.torch_dtype.itemsize,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrix products: q, k, v, o; gate, up, down."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def lm_head_weights(self) -> int:
        return self.hidden_size * self.vocab_size


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches: bytes copied (read plus written) and operations, per second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Floor:
    """A workload's reads and arithmetic, and the seconds that they take at a device's rates."""

    kv_bytes: int
    weight_bytes: int
    decode_steps: int
    prefill_flops: int
    kv_seconds: float
    weight_seconds: float
    prefill_seconds: float

    @property
    def seconds(self) -> float:
        return self.kv_seconds + self.weight_seconds + self.prefill_seconds


def floor(
    shape: Shape, lengths: Sequence[tuple[int, int]], rates: Rates, max_num_seqs: int
) -> Floor:
    """The floor of requests of (prompt, completion) tokens, at most `max_num_seqs` at a time.

    The first token of a completion comes from the prefill, and each other one from a decode step
    that reads the K/V of all tokens before it.
    """
    num_contexts = sum(n * p + n * (n + 1) // 2 for p, n in ((p, o - 1) for p, o in lengths))
    num_steps = num_decode_steps([output for _, output in lengths], max_num_seqs)
    kv_bytes = num_contexts * shape.kv_bytes_per_token
    weight_bytes = num_steps * (shape.layer_weights + shape.lm_head_weights) * shape.itemsize
    prompt_tokens = sum(prompt for prompt, _ in lengths)
    num_pairs = sum(prompt * (prompt + 1) // 2 for prompt, _ in lengths)  # query, key at most at it
    prefill_flops = 2 * (
        shape.layer_weights * prompt_tokens
        + shape.lm_head_weights * len(lengths)
        + 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_pairs
    )
    return Floor(
        kv_bytes=kv_bytes,
        weight_bytes=weight_bytes,
        decode_steps=num_steps,
        prefill_flops=prefill_flops,
        kv_seconds=kv_bytes / rates.bandwidth,
        weight_seconds=weight_bytes / rates.bandwidth,
        prefill_seconds=prefill_flops / rates.flops,
    )


def num_decode_steps(output_lens: Sequence[int], max_num_seqs: int) -> int:
    """Decode steps if each request, in order, takes the row that is free first.

    So the longest completion decides if all run together.
    """
    rows = [0] * min(max_num_seqs, len(output_lens))  # steps after which each is free: a heap
    for output_len in output_lens:
        heapq.heapreplace(rows, rows[0] + output_len - 1)
    return max(rows)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several copies, and of several square matrix products, of random data."""
    return Rates(_copy_bandwidth(device), _matmul_flops(device, dtype))


def _copy_bandwidth(device: torch.device) -> float:
    num_bytes = 2**27
    if device.type == "cuda":
        num_bytes = min(2**31, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_seconds(lambda: torch.matmul(a, b, out=out), device)


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the best of several repeats, of several calls each on a GPU."""
    num_calls = 10 if device.type == "cuda" else 1
    times = []
    for _ in range(REPEATS + 1):
        start = perf_counter()
        for _ in range(num_calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((perf_counter() - start) / num_calls)
    return min(times[1:])  # the first one warms up


def report(shape: Shape, runs: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """Measures the rates, prints the floor of `runs` (alike in lengths) beside what each took, and
    returns it for JSON. With several GPUs the floor takes all to share all of the work."""
    one = measure_rates(config.torch_device, config.torch_dtype)
    num_gpus = config.tensor_parallel_size
    rates = Rates(one.bandwidth * num_gpus, one.flops * num_gpus)
    lengths = list(zip(runs[0]["input_lens"], runs[0]["output_lens"], strict=True))
    least = floor(shape, lengths, rates, config.max_num_seqs)
    num_tokens = runs[0]["output_tokens"]
    dtype = str(config.torch_dtype).removeprefix("torch.")
    print(
        f"Roofline at {si(rates.bandwidth, 'B/s')} copied, read plus written, and "
        f"{si(rates.flops, 'FLOP/s')} in {dtype}, both measured after the runs:"
    )
    _print_row("K/V reads of decode", si(least.kv_bytes, "B"), least.kv_seconds)
    what = f"weight reads, {least.decode_steps} steps"
    _print_row(what, si(least.weight_bytes, "B"), least.weight_seconds)
    _print_row("prefill", si(least.prefill_flops, "FLOP"), least.prefill_seconds)
    _print_row("floor", "", least.seconds, f"{num_tokens / least.seconds:.2f}tok/s")
    for index, run in enumerate(runs):
        seconds = run["seconds"]
        share = f"{least.seconds / seconds:.1%} of the floor's throughput"
        _print_row(f"run {index}", "", seconds, f"{num_tokens / seconds:.2f}tok/s, {share}")
    return {
        "rates": asdict(rates),
        "floor": asdict(least),
        "floor_seconds": least.seconds,
        "floor_output_tokens_per_second": num_tokens / least.seconds,
    }


def _print_row(what: str, amount: str, seconds: float, more: str = "") -> None:
    print(f"  {what:26} {amount:>12} {seconds:9.3f}s  {more}".rstrip(), flush=True)


def si(value: float, unit: str) -> str:
    """Four digits and a decimal prefix: 4.281 TB/s."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.4g} {prefix}{unit}"
        value /= 1000
    return f"{value:.4g} P{unit}"
