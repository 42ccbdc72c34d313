"""Tests the ranks of one host: what one rank does without, and what several exchange."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanovllm.engine.workers import Workers
from nanovllm.utils.distributed import TPGroup
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.reference import HuggingFace

PROMPT = [7, 8, 9]
NAMES = ("FileStore", "PrefixStore", "TCPStore", "ProcessGroupGloo", "ProcessGroupNCCL")


def test_one_rank_needs_no_torch_distributed_and_several_are_refused(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some builds of torch, for small devices among others, come without it."""
    for name in NAMES:
        monkeypatch.delattr(dist, name, raising=False)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with make_llm(tiny_qwen3) as llm:
        ids = greedy_ids(llm, [PROMPT], 4)
    assert ids == [HuggingFace(tiny_qwen3).greedy(PROMPT, 4, stop=frozenset())]
    monkeypatch.setattr(Workers, "start", lambda *_: pytest.fail("it has started"))
    with pytest.raises(RuntimeError, match=r"tensor_parallel_size > 1 needs .*Gloo.*use one rank"):
        make_llm(tiny_qwen3, tensor_parallel_size=2)


def test_collectives_leave_the_default_group_to_the_user(tmp_path: Path) -> None:
    def on_each(size: int, call: Callable[[TPGroup], object]) -> list[object]:
        store = str(tmp_path / f"store-{size}")
        with ThreadPoolExecutor(size) as pool:
            groups = pool.map(lambda rank: TPGroup.connect(rank, size, store), range(size))
            return list(pool.map(call, groups))

    def exchange(group: TPGroup) -> object:
        own = torch.tensor([1.0, 10.0]) * (group.rank + 1)
        gathered = group.all_gather(own)
        assert not dist.is_initialized()
        least = group.min(5 - group.rank)
        return least, group.all_reduce(own).tolist(), gathered.tolist()

    whole = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]
    assert on_each(3, exchange) == [(3, [6.0, 60.0], whole)] * 3
    alone = TPGroup()
    assert exchange(alone) == (5, whole[0], whole[:1])
