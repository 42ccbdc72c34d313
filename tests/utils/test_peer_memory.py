"""Tests that all ranks or none get peer memory, that it is always freed, and that its size is
bounded."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import Any

import pytest
import torch

from nanovllm.utils import peer_memory
from nanovllm.utils.gpu_links import PeerLostError
from nanovllm.utils.peer_memory import MIN_ROWS, PeerMemory, connect_peers
from tests.helpers.faults import SOON

CPU = torch.device("cpu")


class Driver:
    """Simulates the CUDA driver: hands out addresses, takes them back in the context they came
    from, and fails the call `refused`, such as opening another rank's memory."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.held: set[int] = set()
        self.num_bytes = 0
        self.calls: list[str] = []

    def call(self, name: str, *args: Any) -> None:
        if name == self.refused:
            raise OSError(name)
        if name == "cuCtxGetCurrent":
            args[0]._obj.value = 0x77
        elif name == "cuDeviceGetP2PAttribute":
            args[0]._obj.value = 1
        elif name == "cuMemAlloc_v2":
            self.num_bytes = args[1].value
            args[0]._obj.value = 0x1000
            self.held.add(0x1000)
        elif name == "cuIpcGetMemHandle":
            args[0]._obj.reserved = b"handle"
        elif name == "cuIpcOpenMemHandle_v2":
            assert args[1].reserved == b"handle"
            args[0]._obj.value = 0x2000
            self.held.add(0x2000)

    def __getitem__(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuCtxPushCurrent_v2":
                assert args[0].value == 0x77
            elif name in ("cuMemFree_v2", "cuIpcCloseMemHandle"):
                self.held.remove(args[0].value)
            return 0

        return function

    def check_freed(self) -> None:
        """Checks that all memory was freed in its own context after a synchronization, and that the
        thread then got its previous context back."""
        assert not self.held
        first, second, *frees, last = self.calls
        assert [first, second, last] == [
            "cuCtxPushCurrent_v2",
            "cuCtxSynchronize",
            "cuCtxPopCurrent_v2",
        ]
        assert "cuMemFree_v2" in frees


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> local:
    """Returns a thread-local whose `driver` replaces the CUDA driver in each thread."""
    own = local()
    monkeypatch.setattr(peer_memory, "_call", lambda *args: own.driver.call(*args))
    monkeypatch.setattr(peer_memory, "_driver", lambda: own.driver)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    return own


@pytest.mark.parametrize("refused", ["", "cuIpcOpenMemHandle_v2", "cuIpcGetMemHandle"])
def test_peer_memory_is_there_on_all_ranks_or_none(refused: str, own: local) -> None:
    drivers = [Driver(), Driver(refused)]
    barrier, slots = Barrier(2), [torch.empty(0)] * 2

    def connect(rank: int) -> PeerMemory | None:
        own.driver = drivers[rank]

        def all_gather(x: torch.Tensor) -> torch.Tensor:
            slots[rank] = x
            barrier.wait(SOON)
            out = torch.stack(slots)
            barrier.wait(SOON)
            return out

        peers = connect_peers(rank, 2, CPU, (4100, 4000), all_gather)
        if peers is not None:
            assert peers.addresses.tolist() == [0x1000, 0x2000][:: 1 if rank == 0 else -1]
            assert (peers.num_rows, peers.row_bytes) == (4100, 4000)
            for _ in range(2):
                peers.close()
        return peers

    with ThreadPoolExecutor(2) as pool:
        connected = list(pool.map(connect, range(2)))
    assert [peers is not None for peers in connected] == [not refused] * 2
    for driver in drivers:
        driver.check_freed()


@pytest.mark.parametrize("number", [1, 2])
def test_peer_memory_is_freed_if_a_peer_is_lost_on_the_way(number: int, own: local) -> None:
    own.driver = driver = Driver()
    calls: list[torch.Tensor] = []

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) == number:
            raise PeerLostError
        return torch.stack([x, x])

    with pytest.raises(PeerLostError):
        connect_peers(0, 2, CPU, (100, 4000), all_gather)
    driver.check_freed()


@pytest.mark.parametrize(
    ("size", "shape", "num_rows", "held"),
    [
        (2, (10, 100), MIN_ROWS, MIN_ROWS),
        (2, (100_000, 4000), 4194, 1048),  # fewer rows are gathered at a time than summed
        (8, (512, 10240), 58, 58),
    ],
)
def test_peer_memory_has_as_many_rows_as_are_worth_it(
    size: int, shape: tuple[int, int], num_rows: int, held: int, own: local
) -> None:
    own.driver = driver = Driver()
    peers = connect_peers(0, size, CPU, shape, lambda x: torch.stack([x] * size))
    assert peers is not None
    assert peers.num_rows == len(peers.calls) == num_rows
    assert driver.num_bytes == 2 * size * num_rows * peers.row_bytes
    assert peers.holds(held, peers.row_bytes)
    assert not peers.holds(held + 1, peers.row_bytes)
