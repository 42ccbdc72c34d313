"""What ranks on GPUs need that shows without any: their devices, and waits that end."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Barrier, Event, Lock, Thread, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import executor, staging, workers
from nanovllm.engine.llm_engine import make_runner
from nanovllm.engine.workers import Workers
from nanovllm.utils import gpu_links, peer_memory
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_links import GPULinks, PeerLostError
from nanovllm.utils.peer_memory import MIN_ROWS, PeerMemory, connect_peers

CPU = torch.device("cpu")


def test_waiting_for_a_gpu_ends_with_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event passes once nobody waits any more, or never."""
    answers = iter([False, False, True])
    event = SimpleNamespace(query=lambda: next(answers, False))
    links = SimpleNamespace(is_aborted=False)
    group = TPGroup(0, 2, links=links)  # type: ignore[arg-type]
    staging.wait_for(event, group)  # type: ignore[arg-type]
    links.is_aborted, answers = True, iter([False, True])
    with pytest.raises(PeerLostError, match="rank 0 of 2 has lost another"):
        staging.wait_for(event, group)  # type: ignore[arg-type]
    monkeypatch.setattr(staging, "TIMEOUT", timedelta(seconds=0.05))
    with pytest.raises(PeerLostError, match="has not ended within"):
        staging.wait_for(event, group)  # type: ignore[arg-type]


def test_ranks_take_the_first_gpus(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    config = Config(str(tiny_qwen3), tensor_parallel_size=2)
    devices = [config.on_rank(rank).torch_device for rank in range(2)]
    assert devices == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert config.torch_device == devices[0]
    with pytest.raises(ValueError, match=r"_size=5, but torch sees 4 GPUs; use at most 4"):
        Config(str(tiny_qwen3), tensor_parallel_size=5)
    with pytest.raises(ValueError, match=r"device='cuda:1' .* takes cuda:0 to cuda:1; .*VISIBLE"):
        Config(str(tiny_qwen3), tensor_parallel_size=2, device="cuda:1")
    monkeypatch.setattr(Workers, "start", lambda *_: pytest.fail("it has started"))
    monkeypatch.setattr(executor, "has_nccl", lambda: False)
    with pytest.raises(RuntimeError, match="needs NCCL"):
        make_runner(config)


def make_links(**nccl: Callable[..., object]) -> GPULinks:
    links = GPULinks.__new__(GPULinks)
    links.is_aborted = False
    links._calling, links._aborting, links._has_ended = Lock(), Lock(), Event()
    links._nccl = SimpleNamespace(**nccl)
    links.peers = None
    return links


@pytest.mark.parametrize("hangs", [False, True])
def test_nccl_is_aborted_between_calls_unless_one_hangs(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_links, "ABORT_SECONDS", 0.3)
    events: list[str] = []
    is_calling, may_return = Event(), Event()

    def allreduce(*_: object) -> None:
        is_calling.set()
        may_return.wait(5 if hangs else 0.1)
        events.append("returned")

    def abort() -> None:
        events.append("aborted")
        may_return.set()

    links = make_links(allreduce=allreduce, abort=abort)
    caller = Thread(target=links.all_reduce, args=(torch.zeros(1),))
    caller.start()
    is_calling.wait()
    links.abort()
    caller.join()
    assert events == (["aborted", "returned"] if hangs else ["returned", "aborted"])
    links.close()
    with pytest.raises(PeerLostError):
        links.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("names", [("_shutdown", "abort"), ("_abort",), ("_shutdown",)])
def test_nccl_is_aborted_by_what_torch_has_for_it(names: tuple[str, ...]) -> None:
    """2.4 has nothing but `_shutdown`, which in later ones waits for the peers."""
    called: list[str] = []
    links = make_links(**{name: partial(called.append, name) for name in names})
    for _ in range(2):
        links.abort()
    assert called == [names[-1]]


def test_nccl_that_fails_to_end_is_not_waited_for() -> None:
    def abort() -> None:
        raise RuntimeError("NCCL has failed")

    links = make_links(abort=abort)
    with pytest.raises(RuntimeError, match="NCCL has failed"):
        links.abort()
    assert links._has_ended.is_set()


def test_nccl_is_aborted_if_connecting_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    nccl = SimpleNamespace(abort=lambda: aborted.append("NCCL"))
    monkeypatch.setattr(gpu_links, "_connect_nccl", lambda *_: nccl)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)

    def lose(*_: object) -> None:
        raise PeerLostError

    monkeypatch.setattr(gpu_links, "connect_peers", lose)
    with pytest.raises(PeerLostError):
        GPULinks(0, 2, None, torch.device("cuda:0"), (1, 1), lose)
    assert aborted == ["NCCL"]


@pytest.mark.parametrize("is_late", [True, False])
def test_links_that_come_after_ctrl_c_are_ended(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or just before it: nobody will use them."""
    may_connect, has_ended = Event(), Event()
    aborted: list[str] = []
    links = make_links(abort=lambda: aborted.append("NCCL"))
    monkeypatch.setattr(links, "close", has_ended.set)
    group = TPGroup(0, 2, links=links)

    def connect(*_: object) -> TPGroup:
        may_connect.wait(5)
        return group

    def interrupt(futures: list[Future[TPGroup]], _: float) -> None:
        if not is_late:
            may_connect.set()
            futures[0].result()
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "connect", connect)
    monkeypatch.setattr(workers, "wait", interrupt)
    sentinel, other_end = Pipe()
    all_workers = Workers()
    all_workers._workers = [SimpleNamespace(process=SimpleNamespace(sentinel=sentinel))]  # type: ignore[list-item]
    monkeypatch.setattr(all_workers, "check", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        all_workers._connect(None, "")  # type: ignore[arg-type]
    may_connect.set()
    assert has_ended.wait(5)
    assert aborted == ["NCCL"]
    other_end.close()


class Driver:
    """Hands out addresses, and takes them back in the context they come from; what is `refused`
    fails, such as opening another rank's memory."""

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
        """Everything, while nothing ran, in its context; and the thread has its own again."""
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
    """Its `driver` is what the thread takes for CUDA's."""
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
            barrier.wait(5)
            out = torch.stack(slots)
            barrier.wait(5)
            return out

        peers = connect_peers(rank, 2, CPU, (100, 4000), all_gather)
        if peers is not None:
            assert peers.addresses.tolist() == [0x1000, 0x2000][:: 1 if rank == 0 else -1]
            assert (peers.num_rows, peers.row_bytes, peers.rows_offset) == (100, 4000, 1600)
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
    ("size", "shape", "num_rows"),
    [(2, (10, 100), MIN_ROWS), (2, (100_000, 4000), 1048), (8, (512, 10240), 58)],
)
def test_peer_memory_has_no_more_rows_than_it_lets_through(
    size: int, shape: tuple[int, int], num_rows: int, own: local
) -> None:
    own.driver = driver = Driver()
    peers = connect_peers(0, size, CPU, shape, lambda x: torch.stack([x] * size))
    assert peers is not None
    assert peers.num_rows == len(peers.sequence) == num_rows
    assert driver.num_bytes == peers.rows_offset + 2 * size * num_rows * peers.row_bytes
    assert peers.holds(num_rows, peers.row_bytes)
    assert not peers.holds(num_rows + 1, peers.row_bytes)
