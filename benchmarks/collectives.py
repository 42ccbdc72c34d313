"""Summing hidden states over GPUs and normalising them, as twice in each layer: NCCL and then the
norm's kernel, or both in one kernel through peer memory.

Run: python -m benchmarks.collectives --ranks 2

Microseconds per call of a CUDA graph of 72 calls one after another, median of several replays, on
rank 0. Each way's results are compared first. With three ranks or more `ONE_SHOT_BYTES` of
utils/peer_memory.py should be where the last column passes the one before it; with two it never
should.
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

ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16384)
SIZES = (1024, 2560)
CALLS, REPLAYS, WARM_UP = 72, 30, 5
EPS = 1e-6
Way = Callable[[], object]


class Message:
    """What the ranks sum: bf16 [rows, size], small integers, so that no order of summing rounds."""

    def __init__(self, group: TPGroup, peers: PeerMemory, rows: int, size: int) -> None:
        self.group, self.peers = group, peers
        generator = torch.Generator().manual_seed(group.rank)
        x = torch.randint(-8, 9, (rows, size), generator=generator)
        self.x = x.to("cuda", torch.bfloat16)
        self.residual = torch.ones_like(self.x)
        self.weight = torch.linspace(0.5, 1.5, size, device="cuda", dtype=torch.bfloat16)

    def nccl(self) -> object:
        return self.group.all_reduce(self.x)

    def norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(self.x, self.residual, self.weight, EPS)

    def nccl_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.nccl()
        return self.norm()

    def fused(self) -> tuple[torch.Tensor, torch.Tensor]:
        return all_reduce_add_rms_norm(self.x, self.residual, self.weight, EPS, self.peers)

    def check(self) -> None:
        """Fused first: it leaves x alone."""
        fused = [tensor.clone() for tensor in self.fused()]
        self.residual.fill_(1)
        for tensor, expected in zip(fused, self.nccl_and_norm(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def microseconds(group: TPGroup, way: Way) -> float:
    way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            way()
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
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shape = max(ROWS), 2 * max(SIZES)
    group = TPGroup.connect(rank, num_ranks, store_file, device, shape)
    assert group.links is not None
    if group.peers is None:
        raise SystemExit("these GPUs cannot share memory")
    tell = print if rank == 0 else lambda *_: None
    tell("  rows   size     KiB      NCCL      norm  NCCL, norm  one kernel   (us)")
    for size in SIZES:
        for rows in ROWS:
            message = Message(group, group.peers, rows, size)
            message.check()
            ways = message.nccl, message.norm, message.nccl_and_norm, message.fused
            nccl, norm, both, fused = map(partial(microseconds, group), ways)
            tell(
                f"{rows:6} {size:6} {rows * size / 512:7.0f} {nccl:9.2f} {norm:9.2f} "
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
