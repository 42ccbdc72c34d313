"""Chooses how the linear layers of decode steps multiply: torch's way, or one of kernels/linear.py
where that is faster on this GPU.

Measured in CUDA graphs over the layers' own weights, enough of them to overflow a cache if there
are. Those whose result a norm reads are measured with that norm: it is what adds up partial sums;
those that SiLU(gate) * up follows with that, which some ways to multiply do on the way.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.engine.compilation import compile_together
from nanovllm.layers.linear import Product, TunableLinear
from nanovllm.utils.distributed import TPGroup

if TYPE_CHECKING:
    from nanovllm.kernels.linear import Slices, Tiling

MARGIN = 0.97  # of torch's time: what is hardly faster is not worth other roundings
ROUNDS = 5  # of measuring
ENOUGH_BYTES = 2**28  # of weights
TORCH = -1  # its way, where others are known by their index among the candidates

# By device and shape, so that an engine rounds as earlier ones of this process, though times vary.
_chosen: dict[tuple[object, ...], int] = {}


def tune_linears(model: nn.Module, max_rows: int, group: TPGroup) -> None:
    """Sets the products of the model's linear layers, for up to `max_rows` rows at least. Rank 0
    decides for all."""
    from nanovllm.kernels.linear import CANDIDATES

    limits = [limit for limit in CANDIDATES if limit < max_rows]
    limits += [limit for limit in CANDIDATES if limit >= max_rows][:1]
    alike: dict[tuple[object, ...], list[TunableLinear]] = {}
    for layer in model.modules():
        if isinstance(layer, TunableLinear) and layer.is_tunable:
            alike.setdefault((layer.weight.shape, type(layer)), []).append(layer)
    if group.rank == 0:
        _compile([layers[0] for layers in alike.values()], limits, group)
    for key, layers in alike.items():
        choices = [0] * len(limits)
        if group.rank == 0:
            choices = [_choice((limit, group.size, *key), layers, limit, group) for limit in limits]
        choices = group.all_gather(torch.tensor(choices, device="cpu"))[0].tolist()
        products = [
            (limit, None if choice == TORCH else CANDIDATES[limit][choice])
            for limit, choice in zip(limits, choices, strict=True)
        ]
        for layer in layers:
            layer.products = tuple(products)


def _compile(layers: Sequence[TunableLinear], limits: Sequence[int], group: TPGroup) -> None:
    """Compiles the candidates, each for one of the layers that it suits: shapes do not matter."""
    from nanovllm.kernels.linear import CANDIDATES, Tiling

    launches = {}
    for limit, layer in itertools.product(limits, layers):
        for candidate in CANDIDATES[limit]:
            if isinstance(candidate, Tiling) and _suits(candidate, layer, limit, group):
                x = layer.weight.new_zeros(limit, layer.weight.shape[1])
                launches[candidate.kernel] = partial(layer.multiply, x, candidate)
    if launches:
        compile_together(list(launches.values()), layers[0].weight.device)


def _suits(product: "Tiling | Slices", layer: TunableLinear, num_rows: int, group: TPGroup) -> bool:
    if product.is_gated and not layer.is_gated:
        return False
    if product.splits > 1:
        # With ranks only the kernel that sums over them adds up partial sums, too.
        row_bytes = len(layer.weight) * layer.weight.itemsize
        if not (layer.leaves_partial_sums and group.sums_in_norm(num_rows, row_bytes)):
            return False
    return product.fits(layer.weight)


def _choice(
    key: tuple[object, ...], layers: Sequence[TunableLinear], num_rows: int, group: TPGroup
) -> int:
    weight = layers[0].weight
    key = (torch.cuda.get_device_name(weight.device), weight.dtype, *key)
    if key not in _chosen:
        count = -(-ENOUGH_BYTES // weight.nbytes)
        _chosen[key] = _fastest(layers[:count], num_rows, group)
    return _chosen[key]


def _fastest(layers: Sequence[TunableLinear], num_rows: int, group: TPGroup) -> int:
    """The index of the fastest candidate for `num_rows` rows, or `TORCH`."""
    from nanovllm.kernels.layernorm import add_rms_norm
    from nanovllm.kernels.linear import CANDIDATES

    weight, has_norm = layers[0].weight, layers[0].leaves_partial_sums
    num_outputs, size = weight.shape
    generator = torch.Generator(weight.device).manual_seed(0)  # the default one is the user's
    x = weight.new_empty(num_rows, size).normal_(generator=generator)
    norm_weight, residual = weight.new_ones(num_outputs), weight.new_zeros(num_rows, num_outputs)

    def run(product: Product | None) -> None:
        for layer in layers:
            out = layer.multiply(x, product)
            if has_norm:
                add_rms_norm(out, residual, norm_weight, 1.0)

    products = CANDIDATES[num_rows]
    suiting = [i for i, p in enumerate(products) if _suits(p, layers[0], num_rows, group)]
    runs = [partial(run, None), *(partial(run, products[index]) for index in suiting)]
    torch_time, *times = _graph_times(runs, weight.device)
    time, best = min(zip(times, suiting, strict=True), default=(torch_time, TORCH))
    return best if time < MARGIN * torch_time else TORCH


def _graph_times(runs: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Milliseconds of each in a CUDA graph, captured on the current stream; measured in turns, so
    that what else goes on falls on all."""
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
