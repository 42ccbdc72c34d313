"""Chooses how the linear layers of decode steps multiply: torch's way, or one of kernels/linear.py
where that is faster on this GPU.

Measured in CUDA graphs over the layers' own weights, more of them than a cache holds. Those whose
result a norm reads are measured with that norm: it is what adds up partial sums.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from nanovllm.layers.linear import Product, Products, TunableLinear, linear

MARGIN = 0.97  # of torch's time: what is hardly faster is not worth other roundings
REPEATS = 3
MAX_LAYERS = 16

# By device and shape, so that an engine rounds as earlier ones of this process, though times vary.
_chosen: dict[tuple[object, ...], Products] = {}


def tune_linears(model: nn.Module, max_rows: int) -> None:
    """Sets the products of the model's linear layers, for up to `max_rows` rows at least."""
    from nanovllm.kernels.linear import CANDIDATES

    limits = [limit for limit in CANDIDATES if limit < max_rows]
    limits += [limit for limit in CANDIDATES if limit >= max_rows][:1]
    alike: dict[tuple[object, ...], list[TunableLinear]] = {}
    for layer in model.modules():
        if isinstance(layer, TunableLinear) and layer.is_tunable:
            weight = layer.weight
            device = torch.cuda.get_device_name(weight.device)
            key: tuple[object, ...] = (device, weight.dtype, weight.shape, type(layer))
            alike.setdefault(key, []).append(layer)
    for key, layers in alike.items():
        known = _chosen.get(key, ())
        _chosen[key] = known + tuple(
            (limit, _fastest(layers[:MAX_LAYERS], limit)) for limit in limits[len(known) :]
        )
        for layer in layers:
            layer.products = _chosen[key]


def _fastest(layers: Sequence[TunableLinear], num_rows: int) -> Product | None:
    """The way to multiply `num_rows` rows, None for torch's."""
    from nanovllm.kernels.layernorm import add_rms_norm
    from nanovllm.kernels.linear import CANDIDATES

    weight, has_norm = layers[0].weight, layers[0].leaves_partial_sums
    num_outputs, size = weight.shape
    x, norm_weight = weight.new_empty(num_rows, size).normal_(), weight.new_ones(num_outputs)
    residual = weight.new_zeros(num_rows, num_outputs)

    def run(product: Product | None) -> None:
        multiply = linear if product is None else product.multiply
        for layer in layers:
            out = multiply(x, layer.weight)
            if has_norm:
                add_rms_norm(out, residual, norm_weight, 1.0)

    best, best_time = None, MARGIN * _graph_time(partial(run, None), weight.device)
    for product in CANDIDATES[num_rows]:
        if product.fits(weight) and (has_norm or product.splits == 1):
            time = _graph_time(partial(run, product), weight.device)
            if time < best_time:
                best, best_time = product, time
    return best


def _graph_time(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of `run` in a CUDA graph, captured on the current stream."""
    run()  # compiles
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    times: list[float] = []
    for _ in range(1 + REPEATS):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])
