"""Steps as CUDA graphs: one per bucket of sizes, replayed for any batch that fits.

Padding contract: unused rows are -1, and every kernel of the step leaves a row of -1 alone: nothing
gathered, stored or written back.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

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


class StepGraphs:
    """One graph for each size of `step`, which maps an input int64 [size] to sampled ids.

    padding: an input filled with it makes a step without effect, for the time of the capture.

    The graphs are captured on the current stream, which must not be the device's default one;
    another stream would take workspaces of its own.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        device: torch.device,
        padding: int = -1,
    ) -> None:
        self._sizes = sorted(sizes)
        self._input = torch.full((self._sizes[-1],), padding, dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sampled: dict[int, torch.Tensor] = {}
        pool, stream = None, torch.cuda.current_stream(device)
        for size in reversed(self._sizes):  # largest first: the others fit into its memory
            graph = torch.cuda.CUDAGraph()
            step(self._input[:size])  # whatever initialises lazily must do so outside the capture
            torch.cuda.synchronize(device)
            # thread_local: other threads, such as NCCL's, may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                self._sampled[size] = step(self._input[:size])
            pool = pool or graph.pool()
            self._graphs[size] = graph

    def size_for(self, size: int) -> int | None:
        """Returns the smallest captured size that holds `size`, None if there is none."""
        index = bisect_left(self._sizes, size)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, numbers: torch.Tensor) -> torch.Tensor:
        """numbers: int64 of a captured size, padded -> what the step returns for them.

        The result is valid until the next replay; `DeviceToHost.fetch` queues its copy before that.
        """
        size = len(numbers)
        self._input[:size].copy_(numbers)
        self._graphs[size].replay()
        return self._sampled[size]


def graph_bytes(
    capture: Callable[[Sequence[int]], StepGraphs], sizes: Sequence[int], device: torch.device
) -> int:
    """Returns the GPU memory that graphs of all `sizes`, ascending, will take.

    All share the memory of the largest, and each has nodes of its own. Both are measured on the two
    largest, by the device's free memory: torch's statistics do not count them.
    """
    if not sizes:
        return 0
    frees = [_free_bytes(device)]
    for count in (1, 2):
        graphs = capture(sizes[-count:])
        frees.append(_free_bytes(device))
        del graphs
    first, second = frees[0] - frees[1], frees[0] - frees[2]
    return first + max(second - first, 0) * (len(sizes) - 1)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
