"""Tests that a construction which fails keeps nothing while its exception is held, and that what
the config alone can show is refused before a model is made."""

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.engine import llm_engine, model_runner
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.workers import RankDiedError
from nanovllm.utils import loader
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.faults import StepError, fail

PROMPT = [7, 8, 9]
MIB = 2**20


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """Collects weak references to all that is made of models, weights and runners, with the
    collector of cycles switched off, as it comes whenever it likes."""
    references: list[Callable[[], object]] = []
    load_model = model_runner.load_model
    init = ModelRunner.__init__

    def watched_load(model: Any, *args: Any, **kwargs: Any) -> None:
        references.extend(weakref.ref(param) for param in model.parameters())
        references.append(weakref.ref(model))
        load_model(model, *args, **kwargs)

    def watched_init(runner: ModelRunner, *args: Any) -> None:
        references.append(weakref.ref(runner))
        init(runner, *args)

    monkeypatch.setattr(model_runner, "load_model", watched_load)
    monkeypatch.setattr(ModelRunner, "__init__", watched_init)
    gc.disable()
    yield references
    gc.enable()


def fail_chained(*_: object) -> None:
    try:
        fail()
    except StepError as error:
        raise ValueError("of something else") from error


def at_users() -> None:
    kept = 1  # noqa: F841 - a debugger may want it
    fail()


STAGES: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "within loading": (loader, "LoadingProgress", lambda *_, **__: fail_chained()),
    "pool": (KVCache, "allocate", fail_chained),
    "kernels": (model_runner, "compile_cpu_kernels", fail_chained),
    "scheduler": (llm_engine, "Scheduler", lambda *_, **__: fail_chained()),
}


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_while_the_exception_is_held(
    stage: str,
    made: list[Callable[[], object]],
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*STAGES[stage])
        try:
            at_users()
        except StepError as error:
            users = error
            with pytest.raises(ValueError, match="of something else") as caught:
                make_llm(tiny_qwen3)
    last = [frame for frame, _ in traceback.walk_tb(users.__traceback__)][1]
    assert last.f_locals == {"kept": 1}, "cleared what is the user's"
    assert len(made) > 3
    assert [reference() for reference in made if reference() is not None] == []
    with make_llm(tiny_qwen3) as llm:
        assert len(greedy_ids(llm, [PROMPT], 4)[0]) == 4
    assert isinstance(caught.value.__cause__, StepError)


def test_nothing_of_two_ranks_is_left(
    made: list[Callable[[], object]], tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "allocate", fail_chained)  # rank 0's; the other one goes on
        with pytest.raises((ValueError, RankDiedError)) as caught:
            make_llm(tiny_qwen3, tensor_parallel_size=2)
    assert len(made) > 3
    assert [reference() for reference in made if reference() is not None] == []
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize(
    ("knobs", "pattern"),
    [
        ({"num_kvcache_blocks": 7}, "takes 8 blocks; raise num_kvcache_blocks to 8"),
        ({"num_kvcache_blocks": 2**31 - 1}, r"for 2147483647 K/V blocks.*: at most \d+ blocks"),
        ({"num_kvcache_blocks": -1, "kvcache_block_size": 2**30}, "1 K/V blocks.*: at most 0 b"),
        ({"max_num_seqs": 65_535, "kvcache_block_size": 1, "max_model_len": 1024}, "cannot hold"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_before_the_model_is_made(
    knobs: dict[str, int], pattern: str, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_engine, "make_runner", lambda _: pytest.fail("made a runner"))
    with pytest.raises(ValueError, match=pattern):
        make_llm(tiny_qwen3, **knobs)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_has_its_memory_back_while_the_exception_is_held(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llm(tiny_qwen3, device="cuda").exit()  # what the first engine of a process leaves
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    held = []
    for stage in ("allocate_on_gpu", "allocate"):
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, stage, fail_chained)
            with pytest.raises(ValueError, match="of something else") as caught:
                make_llm(tiny_qwen3, device="cuda")
        held.append(caught)
        assert torch.cuda.memory_reserved() - reserved <= 2 * MIB
        assert free - torch.cuda.mem_get_info()[0] <= 64 * MIB
    assert len(held) == 2
