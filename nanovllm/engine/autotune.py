"""Chooses the matmuls of captured decode steps: torch's own, or a faster one of kernels/matmul.py.

Only CUDA graphs use the choice: a step that is launched kernel by kernel is bound by the host, for
which torch's own matmuls are cheaper to launch than Triton's kernels.

Candidates are measured on this GPU in CUDA graphs, over the layers' own weights, of which it takes
enough to overflow the cache. A layer is measured with what reads its result: the norm that adds up
split-K's partial sums, or the SiLU(gate) * up that some matmuls compute in their epilogue.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanovllm.layers.linear import Linear, Matmul, MatmulTable
from nanovllm.models.causal_lm import CausalLM
from nanovllm.utils.distributed import TPGroup

if TYPE_CHECKING:
    from nanovllm.kernels.matmul import Candidate

MARGIN = 0.97  # of torch's time: what is hardly faster is not worth other roundings
ROUNDS = 5  # of measuring
ENOUGH_BYTES = 2**28  # of weights
TORCH = -1  # stands for torch's own matmul, where others are indices of the candidates

TunedMatmuls = list[tuple[Linear, MatmulTable]]


@contextmanager
def applied(tuned: TunedMatmuls) -> Iterator[None]:
    """Lets the layers use the matmuls chosen for them within the block."""
    for layer, matmuls in tuned:
        layer.matmuls = matmuls
    try:
        yield
    finally:
        for layer, _ in tuned:
            layer.matmuls = ()


def autotune_matmuls(model: CausalLM, max_num_tokens: int, group: TPGroup) -> TunedMatmuls:
    """Chooses matmuls for the model's linear layers, for steps of up to `max_num_tokens` tokens.

    Layers of one shape and kind get the same. Rank 0 decides for all ranks.
    """
    from nanovllm.kernels.matmul import CANDIDATES

    limits = _limits(max_num_tokens)
    tuned: TunedMatmuls = []
    for layers in _alike(model):
        choices = [TORCH] * len(limits)
        if group.rank == 0:
            choices = [_fastest(layers, limit, group) for limit in limits]
        choices = group.all_gather(torch.tensor(choices, device="cpu"))[0].tolist()
        matmuls = tuple(
            (limit, None if choice == TORCH else CANDIDATES[limit][choice])
            for limit, choice in zip(limits, choices, strict=True)
        )
        tuned += [(layer, matmuls) for layer in layers]
    return tuned


def candidate_calls(
    model: CausalLM, max_num_tokens: int, group: TPGroup
) -> list[Callable[[], object]]:
    """Returns calls of all kernels that `autotune_matmuls` measures on this rank."""
    from nanovllm.kernels.matmul import CANDIDATES

    if group.rank != 0:
        return []
    calls: dict[object, Callable[[], object]] = {}
    # Those for the most of a few tokens take the longest to compile.
    for limit, (layer, *_) in itertools.product(reversed(_limits(max_num_tokens)), _alike(model)):
        for candidate in CANDIDATES[limit]:
            if _suits(candidate, layer, limit, group):
                x = layer.weight.new_zeros(limit, layer.weight.shape[1])
                calls[candidate.compiled_as(layer.weight)] = partial(layer.multiply, x, candidate)
    return list(calls.values())


def _limits(max_num_tokens: int) -> list[int]:
    """Returns the numbers of tokens, as keys of `CANDIDATES`, that steps of up to `max_num_tokens`
    need matmuls for."""
    from nanovllm.kernels.matmul import CANDIDATES

    limits = [limit for limit in CANDIDATES if limit < max_num_tokens]
    return limits + [limit for limit in CANDIDATES if limit >= max_num_tokens][:1]


def _alike(model: CausalLM) -> list[list[Linear]]:
    """Returns the layers whose matmuls may be chosen, those of one shape and kind together."""
    alike: dict[tuple[object, ...], list[Linear]] = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.is_tunable:
            alike.setdefault((layer.weight.shape, type(layer)), []).append(layer)
    return list(alike.values())


def _suits(matmul: "Candidate", layer: Linear, num_tokens: int, group: TPGroup) -> bool:
    if matmul.has_silu_epilogue and not layer.is_gated:
        return False
    if matmul.split_k > 1:
        # With ranks, only the kernel that sums over them adds up partial sums too.
        token_bytes = len(layer.weight) * layer.weight.itemsize
        has_sum = group.size == 1 or group.peers_for_sum(num_tokens, token_bytes) is not None
        if not (layer.can_leave_partial_sums and has_sum):
            return False
    return matmul.supports(layer.weight)


def _fastest(layers: Sequence[Linear], num_tokens: int, group: TPGroup) -> int:
    """Returns the index of the fastest candidate for so many tokens, or `TORCH`."""
    from nanovllm.kernels.layernorm import add_rms_norm
    from nanovllm.kernels.matmul import CANDIDATES

    layers = layers[: -(-ENOUGH_BYTES // layers[0].weight.nbytes)]
    weight, has_norm = layers[0].weight, layers[0].can_leave_partial_sums
    num_outputs, size = weight.shape
    generator = torch.Generator(weight.device).manual_seed(0)  # the default one is the user's
    x = weight.new_empty(num_tokens, size).normal_(generator=generator)
    norm_weight, residual = weight.new_ones(num_outputs), weight.new_zeros(num_tokens, num_outputs)

    def run(matmul: Matmul | None) -> None:
        for layer in layers:
            out = layer.multiply(x, matmul)
            if has_norm:
                add_rms_norm(out, residual, norm_weight, 1.0)

    candidates = CANDIDATES[num_tokens]
    suiting = [i for i, m in enumerate(candidates) if _suits(m, layers[0], num_tokens, group)]
    runs = [partial(run, None), *(partial(run, candidates[index]) for index in suiting)]
    torch_time, *times = _graph_times(runs, weight.device)
    time, best = min(zip(times, suiting, strict=True), default=(torch_time, TORCH))
    return best if time < MARGIN * torch_time else TORCH


def _graph_times(runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Returns the milliseconds of each run as a CUDA graph, captured on the current stream.

    The graphs are replayed in turns, so that what else the GPU does falls on all of them.
    """
    graphs, stream = [torch.cuda.CUDAGraph() for _ in runs], torch.cuda.current_stream(device)
    for run, graph in zip(runs, graphs, strict=True):
        run()  # compiles
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    times = [float("inf")] * len(graphs)
    for _ in range(ROUNDS):
        for index, graph in enumerate(graphs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[index] = min(times[index], start.elapsed_time(end))
    return times
