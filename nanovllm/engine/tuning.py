"""Chooses how the linear layers of decode steps multiply: torch's way, or one of kernels/linear.py
where that is faster on this GPU.

Measured in CUDA graphs over the layers' own weights, enough of them to overflow a cache if there
are. Those whose result a norm reads are measured with that norm: it is what adds up partial sums;
those that SiLU(gate) * up follows with that, which some ways to multiply do on the way.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from nanovllm.layers.linear import Product, TunableLinear
from nanovllm.utils.distributed import TPGroup

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
    from nanovllm.kernels.linear import CANDIDATES, Slices, Tiling

    weight, has_norm = layers[0].weight, layers[0].leaves_partial_sums
    num_outputs, size = weight.shape
    generator = torch.Generator(weight.device).manual_seed(0)  # the default one is the user's
    x = weight.new_empty(num_rows, size).normal_(generator=generator)
    norm_weight, residual = weight.new_ones(num_outputs), weight.new_zeros(num_rows, num_outputs)
    # With ranks only the kernel that sums over them adds up partial sums, too.
    can_split = has_norm and group.sums_in_norm(num_rows, num_outputs * weight.itemsize)

    def suits(product: Tiling | Slices) -> bool:
        if (product.is_gated and not layers[0].is_gated) or (product.splits > 1 and not can_split):
            return False
        return product.fits(weight)

    def run(product: Product | None) -> None:
        for layer in layers:
            out = layer.multiply(x, product)
            if has_norm:
                add_rms_norm(out, residual, norm_weight, 1.0)

    products = CANDIDATES[num_rows]
    suiting = [index for index, product in enumerate(products) if suits(product)]
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
