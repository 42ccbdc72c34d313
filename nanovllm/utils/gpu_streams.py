"""CUDA streams of engines, for the next engine to use again.

torch keeps a workspace of cuBLAS (some 40 MiB) for every stream that has ever multiplied, as long
as the process lives: CUDA graphs hold its address. A new stream per engine would leave them all.
"""

from collections import defaultdict

import torch

_idle: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream of this device that no other engine uses."""
    try:  # rather than ask first: another thread may take the last one
        return _idle[device].pop()
    except IndexError:
        return torch.cuda.Stream(device)


def give_back_stream(stream: torch.cuda.Stream) -> None:
    """Leaves a stream, on which nothing runs any more, to the next engine."""
    _idle[stream.device].append(stream)
