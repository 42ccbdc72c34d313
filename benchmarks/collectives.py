"""Compares two ways to sum hidden states over GPUs and normalise them, as each layer does twice:
NCCL and then the norm's kernel, or one kernel for both through peer memory.

Run: python -m benchmarks.collectives --ranks 2

Prints microseconds per call on rank 0: a CUDA graph holds 72 calls in sequence, and the median of
its replays counts. Both ways must first give the same result. With three ranks or more
`ONE_SHOT_BYTES` of utils/peer_memory.py should be the size at which the last column exceeds the one
before it. With two ranks it should never exceed it.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.multiprocessing.spawn import spawn

from nanovllm.kernels.all_reduce import all_reduce_add_rms_norm
from nanovllm.kernels.layernorm import add_rms_norm
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.peer_memory import PeerMemory

NUMS_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16384)
SIZES = (1024, 2560)
CALLS, REPLAYS, WARM_UP = 72, 30, 5
EPS = 1e-6
Call = Callable[[], object]


class Message:
    """Hidden states to sum, bf16 [num_tokens, size]: small integers, so that sums are exact."""

    def __init__(self, group: TPGroup, peers: PeerMemory, num_tokens: int, size: int) -> None:
        self.group, self.peers = group, peers
        generator = torch.Generator().manual_seed(group.rank)
        x = torch.randint(-8, 9, (num_tokens, size), generator=generator)
        self.x = x.to("cuda", torch.bfloat16)
        self.residual = torch.ones_like(self.x)
        self.weight = torch.linspace(0.5, 1.5, size, device="cuda", dtype=torch.bfloat16)

    def nccl(self) -> object:
        """Sums x over the ranks in place."""
        return self.group.all_reduce(self.x)

    def norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x to the residual -> (the norm of that, the residual)."""
        return add_rms_norm(self.x, self.residual, self.weight, EPS)

    def nccl_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Does the sum and the norm in two kernels; changes x -> (norm, residual)."""
        self.nccl()
        return self.norm()

    def fused(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Does the sum and the norm in one kernel; leaves x alone -> (norm, residual)."""
        return all_reduce_add_rms_norm(self.x, self.residual, self.weight, EPS, self.peers)

    def check(self) -> None:
        """Raises `AssertionError` unless both ways give the same result."""
        fused = [tensor.clone() for tensor in self.fused()]  # first, as it leaves x alone
        self.residual.fill_(1)
        for tensor, expected in zip(fused, self.nccl_and_norm(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def microseconds(group: TPGroup, call: Call) -> float:
    """Returns the time of one call within a CUDA graph of `CALLS`, the median of its replays."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times: list[float] = []
    for _ in range(WARM_UP + REPLAYS):
        group.min(0)  # all start together
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    group.min(0)
    return median(times[WARM_UP:])


def measure(rank: int, num_ranks: int, store_file: str) -> None:
    """Takes part as one rank, in a process of its own; rank 0 prints the table."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    exchange_shape = max(NUMS_TOKENS), 2 * max(SIZES)  # a bf16 hidden state per row
    group = TPGroup.connect(rank, num_ranks, store_file, device, exchange_shape)
    assert group.links is not None
    if group.peers is None:
        raise SystemExit("these GPUs cannot share memory")
    show = print if rank == 0 else lambda *_: None
    show("tokens   size     KiB      NCCL      norm  NCCL, norm  one kernel   (us)")
    for size in SIZES:
        for num_tokens in NUMS_TOKENS:
            message = Message(group, group.peers, num_tokens, size)
            message.check()
            calls = message.nccl, message.norm, message.nccl_and_norm, message.fused
            nccl, norm, both, fused = map(partial(microseconds, group), calls)
            show(
                f"{num_tokens:6} {size:6} {num_tokens * size / 512:7.0f} {nccl:9.2f} {norm:9.2f} "
                f"{both:11.2f} {fused:11.2f}"
            )
    group.links.abort()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="GPUs that take part (2)")
    args = parser.parse_args(argv)
    if not 2 <= args.ranks <= torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks}: must be 2 to the {torch.cuda.device_count()} GPUs")
    with tempfile.TemporaryDirectory() as directory:
        store_file = str(Path(directory) / "store")
        spawn(measure, args=(args.ranks, store_file), nprocs=args.ranks)


if __name__ == "__main__":
    main()
