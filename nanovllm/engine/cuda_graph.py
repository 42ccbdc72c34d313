"""Steps as CUDA graphs: one per bucket of sizes, replayed for any batch that fits.

Padding contract: unused rows are -1, and every kernel of the step leaves a row of -1 alone: nothing
gathered, stored or written back.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

LARGEST_BUCKET = 2048


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Returns batch sizes of decode: 1, 2, 4, then multiples of 8, of 16 from 256 on and of 64 from
    512 on, up to `LARGEST_BUCKET`.

    The last one is `max_num_seqs` itself, if it is not larger than that.
    """
    largest = min(max_num_seqs, LARGEST_BUCKET)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, LARGEST_BUCKET, 64)]
    return [size for size in sizes if size < largest] + [largest]


class StepLayout(Protocol):
    """How the inputs of a step of bounded size lie in one int64 array."""

    @property
    def size(self) -> int:
        """The number of elements of the array; each layout of a `StepGraphs` has another."""
        ...

    @property
    def padding(self) -> np.ndarray:
        """Inputs of a step without effect, int64 [size]."""
        ...

    def holds(self, part: Any) -> bool:
        """Whether the inputs of this part of a batch fit."""
        ...

    def pack(self, part: Any) -> np.ndarray:
        """Returns the inputs of a part that fits, padded, int64 [size]."""
        ...


Layout = TypeVar("Layout", bound=StepLayout)


class _Borrowed:
    """Memory of a graph, as torch can view it without keeping it allocated."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",  # whatever they are: it knows no bfloat16
            "version": 3,
        }


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor that does not keep its memory allocated.

    Graphs that share a pool may use the same memory for their results, one after the other: the
    logits of all batch sizes would not fit side by side.
    """
    assert tensor.is_contiguous()
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device).view(tensor.dtype)


class StepGraphs(Generic[Layout]):
    """One graph of `step` for each layout of its inputs, which it maps to result tensors.

    The graphs are captured on the current stream, which must not be the device's default one;
    another stream would take workspaces of its own.
    """

    def __init__(
        self,
        step: Callable[[Layout, torch.Tensor], tuple[torch.Tensor, ...]],
        layouts: Sequence[Layout],
        device: torch.device,
    ) -> None:
        """layouts: ascending in size."""
        self._layouts = layouts
        self._inputs = torch.empty(layouts[-1].size, dtype=torch.int64, device=device)
        self._graphs: dict[Layout, torch.cuda.CUDAGraph] = {}
        self._results: dict[Layout, tuple[torch.Tensor, ...]] = {}
        pool, stream = None, torch.cuda.current_stream(device)
        for layout in reversed(layouts):  # largest first: the others fit into its memory
            graph, inputs = torch.cuda.CUDAGraph(), self._inputs[: layout.size]
            inputs.copy_(torch.from_numpy(layout.padding))
            step(layout, inputs)  # whatever initialises lazily must do so outside the capture
            torch.cuda.synchronize(device)
            # thread_local: other threads, such as NCCL's, may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                results = step(layout, inputs)
            self._results[layout] = tuple(map(_borrowed, results))
            del results
            pool = pool or graph.pool()
            self._graphs[layout] = graph

    def layout_for(self, part: Any) -> Layout | None:
        """Returns the smallest layout that holds this part of a batch, None if there is none."""
        return next((layout for layout in self._layouts if layout.holds(part)), None)

    def replay(self, layout: Layout, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """packed: inputs on the device, int64 [layout.size] -> what the step returns for them.

        The results are valid until the next replay; whoever reads them queues that before.
        """
        self._inputs[: layout.size].copy_(packed)
        self._graphs[layout].replay()
        return self._results[layout]


def graph_bytes(
    capture: Callable[[Sequence[Layout]], object], layouts: Sequence[Layout], device: torch.device
) -> int:
    """Returns the GPU memory that graphs of all layouts, ascending, will take.

    All share the memory of the largest, and each has nodes of its own. Both are measured on the two
    largest, by the device's free memory: torch's statistics do not count them.
    """
    if not layouts:
        return 0
    frees = [_free_bytes(device)]
    for count in (1, 2):
        graphs = capture(layouts[-count:])
        frees.append(_free_bytes(device))
        del graphs
    first, second = frees[0] - frees[1], frees[0] - frees[2]
    return first + max(second - first, 0) * (len(layouts) - 1)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
