"""Tests exchanges through peer memory, with one process per rank, on GPUs or interpreted in shared
CPU memory."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.peer_memory import EMPTY_WORD, ONE_SHOT_BYTES, PeerMemory
from tests.helpers.closeness import assert_close
from tests.helpers.faults import STARTING
from tests.helpers.interpreter import patch_once

pytest.importorskip("triton")
from nanovllm.kernels.all_reduce import all_gather, all_reduce_add_rms_norm

EPS = 1e-6
NUM_ROWS, ROW_BYTES = 4, 1024
CPU = torch.device("cpu")
EMPTY = torch.tensor([EMPTY_WORD - 2**32], dtype=torch.int32)


def part(rank: int, call: int, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Computes what a rank contributes to a call, in any process. Some values equal the mark of
    empty memory."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    x[:, ::7] = EMPTY.view(dtype)[0]
    return x


def expected_norm(
    parts: list[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for x in parts:
        total += x.float()
    norm = RMSNorm(len(weight), EPS)
    norm.weight.data = weight
    out, total = norm.add_forward(total.to(parts[0].dtype), residual)
    return out, total


def check_call(peers: PeerMemory, device: torch.device, call: int, dtype: torch.dtype) -> None:
    """Checks a sum or a gather whose shape and dtype all ranks derive from the number of the
    call."""
    rng = random.Random(call)
    is_gather = call % 4 == 3
    # Gathers move 4-byte words as two halves; a program computes several rows of a sum.
    rows = rng.randint(1, NUM_ROWS // 2 if is_gather else 3 * peers.num_rows)
    itemsize = dtype.itemsize
    size = rng.choice([s for s in (64, 100, 256, 2000) if s * itemsize <= peers.row_bytes])
    parts = [part(rank, call, rows, size, dtype) for rank in range(peers.size)]
    x = parts[peers.rank].to(device, copy=True)
    if is_gather:
        gathered = all_gather(x.view(torch.int32), peers)
        assert torch.equal(gathered.cpu(), torch.stack(parts).view(torch.int32))
        return
    weight = 1 + part(0, -call, 1, size, dtype)[0]
    residual = part(0, -call, rows, size, dtype) if call % 4 else None
    given = None if residual is None else residual.to(device, copy=True)
    # Values that equal the mark of empty memory count as 0.
    parts = [p.where(p.abs() > 1e-30, 0) for p in parts]
    expected = expected_norm(parts, residual, weight)
    if call % 4 == 2:  # a rank's own input may be in several summands, too
        x = torch.stack((x.float() * 0.25, x.float() * 0.75))
    out, total = all_reduce_add_rms_norm(x, given, weight.to(device), EPS, peers)
    assert total is (x if given is None else given)
    assert torch.equal(total.cpu(), expected[1])
    assert_close(out.cpu(), expected[0], num_eps=32 if dtype == torch.float32 else 3)


def on_cpu(rank: int, memory: list[torch.Tensor]) -> None:
    patch_once(pytest.MonkeyPatch())  # of this process
    peers = PeerMemory(
        rank,
        len(memory),
        NUM_ROWS,
        ROW_BYTES,
        addresses=torch.tensor([m.data_ptr() for m in memory]),
        calls=torch.zeros(NUM_ROWS, dtype=torch.int64),
        is_aborted=torch.zeros(1, dtype=torch.int32),
    )
    for call in range(40):
        check_call(peers, CPU, call, (torch.float32, torch.float16)[call // 4 % 2])
    # After an abort, calls end without peers, the second time even with `is_aborted` cleared.
    if rank == 0:
        peers.abort()
        for _ in range(2):
            all_gather(torch.zeros(3, dtype=torch.int32), peers)
            x, weight = torch.zeros(3, 64), torch.ones(64)
            # With one row of memory, the program loops over the rows.
            all_reduce_add_rms_norm(x, None, weight, EPS, replace(peers, num_rows=1))
            peers.is_aborted.zero_()


def on_gpu(rank: int, size: int, store_file: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = TPGroup.connect(rank, size, store_file, device, (NUM_ROWS, 8 * ROW_BYTES))
    peers = group.peers
    assert peers is not None, "these GPUs cannot share memory"
    # Less memory makes programs loop over the rows of a sum.
    small = replace(peers, num_rows=NUM_ROWS * 16)
    for dtype in (torch.float32, torch.bfloat16):
        for call in range(100):
            check_call(small, device, call, dtype)
        x = torch.ones(100_000, device=device, dtype=dtype)
        assert (group.all_reduce(x) == size).all()
        assert (group.all_gather(x[:7]) == size).all()
    torch.cuda.synchronize(device)
    group.min(rank)  # waits until the memory is empty again
    for width, most in ((128, 2 * peers.num_rows + 1), (2000, 700)):
        check_graph(peers, device, width, most)
    group.min(rank)
    assert group.links is not None
    group.links.abort()


def check_graph(peers: PeerMemory, device: torch.device, size: int, most: int) -> None:
    """Replays a graph of exchanges of different shapes many times over changing inputs."""
    half = most // 2
    # (rows that are summed, rows that are gathered)
    shapes = (half, most), (1, 1), (5, 5), (most, 7), (half - 1, half - 1), (2, 2)
    weight = torch.ones(size, device=device, dtype=torch.bfloat16)
    x = torch.zeros(most, size, device=device, dtype=torch.bfloat16)

    def chain() -> list[torch.Tensor]:
        sums = []
        for n, m in shapes:
            _, total = all_reduce_add_rms_norm(x[:n].clone(), None, weight, EPS, peers)
            sums += [total, all_gather(x[:m].view(torch.int32), peers)]
        return sums

    chain()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = chain()
    for call in range(300):
        parts = [part(rank, call, len(x), size, x.dtype) for rank in range(peers.size)]
        x.copy_(parts[peers.rank])
        graph.replay()
        total = torch.stack(parts).float().sum(dim=0).to(x.dtype)
        for i, (n, m) in enumerate(shapes):
            assert torch.equal(outs[2 * i].cpu(), total[:n])
            gathered = outs[2 * i + 1].view(x.dtype).cpu()
            assert torch.equal(gathered, torch.stack([p[:m] for p in parts]))


def run_ranks(target: Callable[..., None], size: int, *args: Any) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=target, args=(i, *args), daemon=True) for i in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(STARTING)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * size


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted")
@pytest.mark.parametrize("size", [3])
def test_ranks_on_the_cpu(size: int) -> None:
    num_words = 2 * size * NUM_ROWS * ROW_BYTES // 4
    memory = [EMPTY.repeat(num_words).share_memory_() for _ in range(size)]
    run_ranks(on_cpu, size, memory)


@pytest.mark.gpu2
def test_ranks_on_gpus(tmp_path: Path) -> None:
    run_ranks(on_gpu, 2, 2, str(tmp_path / "store"))


def test_what_it_holds() -> None:
    none = torch.empty(0)
    peers = PeerMemory(0, 2, 512, 8192, none, none, none)
    assert peers.holds(512, 4096)
    assert not peers.holds(513, 64)
    assert not peers.holds(1, 8200)
    assert peers.holds(512, 8192) == (ONE_SHOT_BYTES >= 512 * 8192)
    assert peers.suits_sum(100_000, 8192)
    assert not peers.suits_sum(1, 8200)
    eight = PeerMemory(0, 8, 512, 8192, none, none, none)
    assert not eight.holds(512, 8192)
    assert not eight.suits_sum(512, 8192)
    assert eight.suits_sum(16, 8192)
