"""Tests products with weights in oneDNN's layout, and where weights keep the plain layout."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers import onednn
from nanovllm.layers.linear import linear
from nanovllm.layers.onednn import reordered
from nanovllm.utils import cpu_features
from nanovllm.utils.host_memory import HostMemory
from tests.helpers.closeness import assert_close


@pytest.mark.parametrize("can_multiply", [True, False], ids=["as it is", "no half precision"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reordered_weights_give_the_same_product(
    dtype: torch.dtype, can_multiply: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_multiply:
        monkeypatch.setattr(cpu_features, "can_multiply", lambda dtype: dtype == torch.float32)
    torch.manual_seed(0)
    dense = nn.Parameter(torch.randn(72, 40, dtype=dtype), requires_grad=False)
    weight = reordered(dense)
    assert weight.shape == dense.shape
    if not can_multiply and weight.is_mkldnn:
        assert weight.dtype == torch.float32
    assert torch.equal(weight.to_dense().to(dtype), dense)
    # bf16 is summed in fp32, fp16 on some CPUs in fp16.
    num_eps = 2 if dtype == torch.bfloat16 else 16
    bias, x = torch.randn(72, dtype=dtype), torch.randn(9, 40, dtype=dtype)
    for rows in (1, 3, 9):
        expected = F.linear(x[:rows].double(), dense.double(), bias.double())
        assert_close(linear(x[:rows], weight, bias), expected, num_eps=num_eps)


@pytest.mark.parametrize(
    ("capability", "has_bf16", "expected"),
    [("AVX2", False, True), ("AVX512", True, True), ("AVX512", False, False)],
)
def test_bf16_that_onednn_only_converts_counts_as_none(
    capability: str, has_bf16: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AVX2, oneDNN claims to multiply bf16 but only converts it, so its claim counts only where
    the CPU has bf16 instructions."""
    monkeypatch.setattr(cpu_features, "can_multiply", lambda dtype: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16, raising=False)
    assert cpu_features.has_instructions(torch.bfloat16) == expected
    assert cpu_features.has_instructions(torch.float16)


@pytest.mark.skipif(not cpu_features.has_onednn(), reason="weights stay as they are")
def test_weights_stay_as_they_are_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "can_multiply", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(onednn, "host_memory", lambda: HostMemory(1200, 4000))
    # Two copies in fp32 take 128 bytes or 288, of the 200 that are not kept for others.
    for size, is_kept in ((4, False), (6, True)):
        weight = nn.Parameter(torch.ones(size, size, dtype=torch.bfloat16), requires_grad=False)
        assert (reordered(weight) is weight) == is_kept


@pytest.mark.skipif(
    not (cpu_features.has_onednn() and cpu_features.can_multiply(torch.bfloat16)),
    reason="oneDNN cannot multiply in bf16",
)
@pytest.mark.parametrize(("available", "dtype"), [(4000, torch.float32), (1000, torch.bfloat16)])
def test_bf16_without_instructions_becomes_fp32_where_memory_allows(
    available: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "has_instructions", lambda dtype: False)
    monkeypatch.setattr(onednn, "host_memory", lambda: HostMemory(available, 4000))
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
    assert reordered(weight).is_mkldnn
    assert reordered(weight).dtype == dtype
