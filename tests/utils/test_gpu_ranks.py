"""Tests, without GPUs, what ranks on GPUs need: the choice of devices, and waits that end."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Event, Lock, Thread
from types import SimpleNamespace

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import executor, staging, workers
from nanovllm.engine.llm_engine import make_runner
from nanovllm.engine.workers import Workers
from nanovllm.utils import gpu_links
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_links import GPULinks, PeerLostError
from tests.helpers.faults import SOON

CPU = torch.device("cpu")


def test_waiting_for_a_gpu_ends_with_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait raises if the event completes only after the links are aborted, or never."""
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
    monkeypatch.setattr(gpu_links, "ABORT_SECONDS", 0.3 if hangs else SOON)
    events: list[str] = []
    is_calling, may_return = Event(), Event()

    def allreduce(*_: object) -> None:
        is_calling.set()
        may_return.wait(SOON if hangs else 0.1)
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
    """Torch 2.4 has only `_shutdown`, which waits for the peers in later versions."""
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


def test_no_thread_outlives_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends first even if it goes on working after it has aborted NCCL."""
    links = make_links(abort=lambda: None)
    abort, close, is_closing = links.abort, links.close, Event()

    def slow_abort() -> None:
        abort()
        is_closing.wait(SOON)
        time.sleep(0.2)

    monkeypatch.setattr(links, "abort", slow_abort)
    monkeypatch.setattr(links, "close", lambda: [is_closing.set(), close()])
    monkeypatch.setattr(workers, "LAST_SECONDS", SOON)
    monkeypatch.setattr(workers, "connect", lambda *_: TPGroup(0, 2, links=links))
    # Returns as if a worker had ended.
    monkeypatch.setattr(workers, "wait_for_end_of_any", lambda _: None)
    all_workers = Workers()
    all_workers._group = all_workers._connect(None, "")  # type: ignore[arg-type]
    watcher = all_workers._watcher
    assert watcher is not None
    assert watcher.is_alive()
    all_workers.close_links()
    assert not watcher.is_alive()


@pytest.mark.parametrize("is_late", [True, False])
def test_links_that_come_after_ctrl_c_are_ended(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links that are connected just before Ctrl-C or after it are closed, because nobody will use
    them."""
    may_connect, has_ended = Event(), Event()
    aborted: list[str] = []
    links = make_links(abort=lambda: aborted.append("NCCL"))
    monkeypatch.setattr(links, "close", has_ended.set)
    group = TPGroup(0, 2, links=links)

    def connect(*_: object) -> TPGroup:
        may_connect.wait(SOON)
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
    assert has_ended.wait(SOON)
    assert aborted == ["NCCL"]
    other_end.close()
