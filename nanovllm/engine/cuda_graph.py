"""Decode steps as CUDA graphs: one per bucket of batch sizes, replayed for any batch that fits.

Padding contract: unused entries of the static `rows` are -1, and every kernel of the step leaves a
row of -1 alone: nothing gathered, stored or written back.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

LARGEST_BUCKET = 512


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Returns 1, 2, 4, then multiples of 8, of 16 from 256 on, up to `LARGEST_BUCKET`.

    The last one is `max_num_seqs` itself, if it is not larger than that.
    """
    largest = min(max_num_seqs, LARGEST_BUCKET)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_BUCKET + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """One graph for each size of `step`, which maps rows int64 [n] to sampled ids int64 [n].

    The graphs are captured on the current stream, which must not be the device's default one;
    another stream would take workspaces of its own.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self._sizes = sorted(sizes)
        self._rows = torch.full((self._sizes[-1],), -1, dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sampled: dict[int, torch.Tensor] = {}
        pool, stream = None, torch.cuda.current_stream(device)
        for size in reversed(self._sizes):  # largest first: the others fit into its memory
            graph = torch.cuda.CUDAGraph()
            step(self._rows[:size])  # whatever initialises lazily must do so outside the capture
            torch.cuda.synchronize(device)
            # thread_local: other threads, such as NCCL's, may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                self._sampled[size] = step(self._rows[:size])
            pool = pool or graph.pool()
            self._graphs[size] = graph

    def size_for(self, num_rows: int) -> int | None:
        """Returns the smallest captured size that holds `num_rows`, None if there is none."""
        index = bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, rows: torch.Tensor) -> torch.Tensor:
        """rows int64 [size], padded with -1 to a captured size -> sampled ids int64 [size].

        The result is valid until the next replay; `DeviceToHost.fetch` queues its copy before that.
        """
        size = len(rows)
        self._rows[:size].copy_(rows)
        self._graphs[size].replay()
        return self._sampled[size]


def graph_bytes(
    capture: Callable[[Sequence[int]], DecodeGraphs], sizes: Sequence[int], device: torch.device
) -> int:
    """Returns the GPU memory that graphs of all `sizes`, ascending, will take.

    All share the memory of the largest, and each has nodes of its own. Both are measured on the two
    largest, by the device's free memory: torch's statistics do not count them.
    """
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
