"""The least time that a workload can take on a device, given two rates measured on it.

Decode is bound by its reads: at each step the K/V of every context token, and the weights of all
matmuls; of a mixture's experts, those that tokens go to, on average, if all are equally likely.
Prefill is bound by its arithmetic. The rest (biases, norms, the embedding lookup, writes,
the sampler) is left out, and so is the cost of a K/V pool that is too small for all rows.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.config import Config
from nanovllm.models.config_fields import resolve_head_dim
from nanovllm.models.qwen3_moe import has_experts

REPEATS = 5


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of the mixtures of experts; `num_layers` layers have one in place of the MLP."""

    num_layers: int
    num_experts: int
    top_k: int
    intermediate_size: int

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> "ExpertShape | None":
        """Returns the shape of a model's experts, None for a dense model."""
        if not hasattr(hf_config, "moe_intermediate_size"):
            return None
        return cls(
            num_layers=sum(has_experts(hf_config, i) for i in range(hf_config.num_hidden_layers)),
            num_experts=hf_config.num_experts,
            top_k=hf_config.num_experts_per_tok,
            intermediate_size=hf_config.moe_intermediate_size,
        )

    def num_active(self, num_tokens: int) -> float:
        """Returns how many of a layer's experts so many tokens go to, on average."""
        is_idle = (1 - self.top_k / self.num_experts) ** num_tokens
        return self.num_experts * (1 - is_idle)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder with gated MLPs that determine its reads and arithmetic."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    itemsize: int  # bytes of a weight
    experts: ExpertShape | None = None
    kv_itemsize: float | None = None  # of K or V, with its share of their scales; None: the same

    @classmethod
    def of(cls, config: Config) -> "Shape":
        """Returns the shape of the engine's model."""
        hf_config, head_dim = config.hf_config, resolve_head_dim(config.hf_config)
        kv_itemsize: float = config.kv_torch_dtype.itemsize
        if config.is_kv_quantised:
            kv_itemsize += torch.bfloat16.itemsize / head_dim
        return cls(
            num_layers=hf_config.num_hidden_layers,
            hidden_size=hf_config.hidden_size,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=hf_config.intermediate_size,
            vocab_size=hf_config.vocab_size,
            itemsize=config.torch_dtype.itemsize,
            experts=ExpertShape.of(hf_config),
            kv_itemsize=kv_itemsize,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return round(elements * (self.kv_itemsize or self.itemsize))

    @property
    def layer_weights(self) -> int:
        """Number of weights that one token meets in the matmuls of all layers."""
        return round(self.weights_of_step(1))

    def weights_of_step(self, num_tokens: int) -> float:
        """Returns how many weights of all layers' matmuls so many tokens meet, on average: q, k, v,
        o; gate, up, down; in a mixture of experts the router and the active experts."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        per_input: float = self.num_layers * attention
        num_dense, experts = self.num_layers, self.experts
        if experts is not None:
            num_dense -= experts.num_layers
            active = 3 * experts.intermediate_size * experts.num_active(num_tokens)
            per_input += experts.num_layers * (experts.num_experts + active)
        return self.hidden_size * (per_input + num_dense * 3 * self.intermediate_size)

    @property
    def lm_head_weights(self) -> int:
        """Number of weights in the LM head."""
        return self.hidden_size * self.vocab_size


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that a device reaches: bytes copied (read plus written) and FLOP, per second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Floor:
    """A workload's reads and arithmetic, and the least seconds for them at a device's rates."""

    kv_bytes: int
    weight_bytes: int
    decode_steps: int
    prefill_flops: int
    kv_seconds: float
    weight_seconds: float
    prefill_seconds: float

    @property
    def seconds(self) -> float:
        """The least seconds of the whole workload."""
        return self.kv_seconds + self.weight_seconds + self.prefill_seconds


def floor(
    shape: Shape, lengths: Sequence[tuple[int, int]], rates: Rates, max_num_seqs: int
) -> Floor:
    """Returns the floor of requests with (prompt, completion) tokens, `max_num_seqs` at a time.

    The first token of a completion comes from the prefill, and each other one from a decode step
    that reads the K/V of all tokens before it.
    """
    num_contexts = sum(n * p + n * (n + 1) // 2 for p, n in ((p, o - 1) for p, o in lengths))
    batches = decode_batches([output for _, output in lengths], max_num_seqs)
    kv_bytes = num_contexts * shape.kv_bytes_per_token
    weight_bytes = shape.itemsize * sum(
        num_steps * (round(shape.weights_of_step(num_seqs)) + shape.lm_head_weights)
        for num_steps, num_seqs in batches
    )
    prompt_tokens = sum(prompt for prompt, _ in lengths)
    num_pairs = sum(prompt * (prompt + 1) // 2 for prompt, _ in lengths)  # (query, visible key)
    prefill_flops = 2 * (
        shape.layer_weights * prompt_tokens
        + shape.lm_head_weights * len(lengths)
        + 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_pairs
    )
    return Floor(
        kv_bytes=kv_bytes,
        weight_bytes=weight_bytes,
        decode_steps=sum(num_steps for num_steps, _ in batches),
        prefill_flops=prefill_flops,
        kv_seconds=kv_bytes / rates.bandwidth,
        weight_seconds=weight_bytes / rates.bandwidth,
        prefill_seconds=prefill_flops / rates.flops,
    )


def decode_batches(output_lens: Sequence[int], max_num_seqs: int) -> list[tuple[int, int]]:
    """Returns (number of decode steps, sequences in each of them) in order, if each request, in
    order, takes the row that frees first. The prefill makes the first token."""
    rows = [0] * min(max_num_seqs, len(output_lens))  # heap: the step at which each row is free
    changes: Counter[int] = Counter()  # of the number of sequences, by step
    for output_len in output_lens:
        start, end = rows[0], rows[0] + output_len - 1
        changes.update({start: 1})
        changes.subtract({end: 1})
        heapq.heapreplace(rows, end)
    batches, num_seqs, previous = [], 0, 0
    for step in sorted(changes):
        if num_seqs and step > previous:
            batches.append((step - previous, num_seqs))
        num_seqs, previous = num_seqs + changes[step], step
    return batches


def num_decode_steps(output_lens: Sequence[int], max_num_seqs: int) -> int:
    """Returns the number of decode steps if each request, in order, takes the row that frees first.

    If all requests run together, that is the length of the longest completion, less the token of
    the prefill.
    """
    return sum(num_steps for num_steps, _ in decode_batches(output_lens, max_num_seqs))


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures the rates: the best of several copies and square matmuls, each of random data.

    To be called before an engine is made: after one has run, copies were 11 % slower on an H200.
    """
    rates = Rates(_copy_bandwidth(device), _matmul_flops(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second that a copy of a large tensor reads and writes."""
    num_bytes = 2**27
    if device.type == "cuda":
        num_bytes = min(2**31, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP per second of a large square matmul."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_seconds(lambda: torch.matmul(a, b, out=out), device)


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns seconds per call, the best of several repeats; a repeat has 10 calls on a GPU."""
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


def report(
    shape: Shape, runs: Sequence[dict[str, Any]], config: Config, one: Rates
) -> dict[str, Any]:
    """Prints the floor of `runs` beside their times, and returns it for JSON.

    one: the rates of one device. All runs have the same lengths. With several GPUs the floor
    assumes that they share all work evenly.
    """
    num_gpus = config.tensor_parallel_size
    rates = Rates(one.bandwidth * num_gpus, one.flops * num_gpus)
    lengths = list(zip(runs[0]["input_lens"], runs[0]["output_lens"], strict=True))
    least = floor(shape, lengths, rates, config.max_num_seqs)
    num_tokens = runs[0]["output_tokens"]
    dtype = str(config.torch_dtype).removeprefix("torch.")
    print(
        f"Roofline at {si(rates.bandwidth, 'B/s')} copied, read plus written, and "
        f"{si(rates.flops, 'FLOP/s')} in {dtype}, both measured before the runs:"
    )
    _print_line("K/V reads of decode", si(least.kv_bytes, "B"), least.kv_seconds)
    what = f"weight reads, {least.decode_steps} steps"
    _print_line(what, si(least.weight_bytes, "B"), least.weight_seconds)
    _print_line("prefill", si(least.prefill_flops, "FLOP"), least.prefill_seconds)
    _print_line("floor", "", least.seconds, f"{num_tokens / least.seconds:.2f}tok/s")
    for index, run in enumerate(runs):
        seconds = run["seconds"]
        share = f"{least.seconds / seconds:.1%} of the floor's throughput"
        _print_line(f"run {index}", "", seconds, f"{num_tokens / seconds:.2f}tok/s, {share}")
    return {
        "rates": asdict(rates),
        "floor": asdict(least),
        "floor_seconds": least.seconds,
        "floor_output_tokens_per_second": num_tokens / least.seconds,
    }


def _print_line(what: str, amount: str, seconds: float, more: str = "") -> None:
    """Prints a line of the report in columns."""
    print(f"  {what:26} {amount:>12} {seconds:9.3f}s  {more}".rstrip(), flush=True)


def si(value: float, unit: str) -> str:
    """Returns the value with four digits and a decimal prefix, e.g. 4.281 TB/s."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.4g} {prefix}{unit}"
        value /= 1000
    return f"{value:.4g} P{unit}"
