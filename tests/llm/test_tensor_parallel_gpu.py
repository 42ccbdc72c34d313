"""Tests what only ranks on GPUs have: peer memory and NCCL."""

import os
from pathlib import Path

import pytest
import torch

from tests.helpers.engines import Ids, make_llm
from tests.helpers.ranks import LONG, LONG_SIZES, ids_of_one_rank, mixed_ids, parts


@pytest.fixture(scope="module")
def prompts(ragged_prompts: list[Ids]) -> list[Ids]:
    return ragged_prompts + LONG


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, prompts: list[Ids]) -> list[Ids]:
    return ids_of_one_rank(tiny_qwen3, prompts, device="cuda", **LONG_SIZES)


@pytest.mark.gpu2
@pytest.mark.parametrize("has_peer_memory", [True, False], ids=["peer memory", "NCCL"])
def test_ids_equal_those_of_one_gpu(
    has_peer_memory: bool,
    tiny_qwen3: Path,
    prompts: list[Ids],
    expected: list[Ids],
    request: pytest.FixtureRequest,
) -> None:
    if not has_peer_memory:
        request.getfixturevalue("no_peer_memory")
    with make_llm(tiny_qwen3, device="cuda", tensor_parallel_size=2, **LONG_SIZES) as llm:
        assert (parts(llm)[0].group.peers is not None) == has_peer_memory
        assert torch.cuda.current_device() == 0
        assert not torch.distributed.is_initialized()
        assert not [name for name in os.environ if name.startswith("TORCH_NCCL_")]
        assert mixed_ids(llm, prompts) == expected


@pytest.mark.gpu
def test_fewer_gpus_than_ranks(tiny_qwen3: Path) -> None:
    size = torch.cuda.device_count() + 1
    if size > 8:
        pytest.skip("as many GPUs as ranks can be")
    with pytest.raises(ValueError, match=rf"_size={size}, but torch sees {size - 1} GPUs"):
        make_llm(tiny_qwen3, device="cuda", tensor_parallel_size=size)
