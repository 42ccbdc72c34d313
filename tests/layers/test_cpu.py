"""What the CPU path does apart from the kernels' torch counterparts: batched decode attention,
weights in oneDNN's layout, memory, and the benchmark beside Hugging Face."""

import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import cpu
from nanovllm.layers import onednn
from nanovllm.layers.attention import LayerCache
from nanovllm.layers.attention_backends.torch_sdpa import GROUP_SIZE, TorchBackend
from nanovllm.layers.linear import linear
from nanovllm.layers.onednn import reordered
from nanovllm.utils import host_memory as host_memory_module
from nanovllm.utils.context import Context
from nanovllm.utils.host_memory import HostMemory, host_memory

NUM_KV_HEADS, GROUP, HEAD_DIM, SCALE = 2, 3, 8, 0.3


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("num_seqs", [1, GROUP_SIZE, 2 * GROUP_SIZE + 3])
def test_decode_attention_equals_the_formula(num_seqs: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(num_seqs)
    lens = torch.randint(0, 40, (num_seqs,), generator=generator)
    lens[0] = 300
    need = (-(-lens // block_size)).tolist()
    block_ids = torch.randperm(sum(need), generator=generator, dtype=torch.int32).split(need)
    tables = torch.full((num_seqs, max(need) + 1), -(2**30), dtype=torch.int32)
    caches = torch.full((2, sum(need), block_size, NUM_KV_HEADS, HEAD_DIM), float("nan"))
    q = torch.randn(num_seqs, NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    expected = torch.zeros_like(q)
    for i, length in enumerate(lens.tolist()):
        tables[i, : need[i]] = block_ids[i]
        if length:
            kv = torch.randn(2, length, NUM_KV_HEADS, HEAD_DIM, generator=generator)
            padded = torch.full((2, need[i] * block_size, *kv.shape[2:]), float("nan"))
            padded[:, :length] = kv
            caches[:, block_ids[i].long()] = padded.unflatten(1, (need[i], block_size))
            keys, values = kv.repeat_interleave(GROUP, dim=2)
            weights = (torch.einsum("hd,lhd->hl", q[i], keys) * SCALE).softmax(dim=-1)
            expected[i] = torch.einsum("hl,lhd->hd", weights, values)
    context = Context(
        slot_mapping=lens, context_lens=lens.int(), block_tables=tables, max_seqlen_k=300
    )
    backend = TorchBackend()
    out = backend.decode(q, LayerCache(*caches), SCALE, context)
    torch.testing.assert_close(out, expected)
    out = backend.decode(
        q, LayerCache(caches[0], -caches[1]), SCALE, context
    )  # the next layer of the step
    torch.testing.assert_close(out, -expected)


@pytest.mark.parametrize("can_multiply", [True, False], ids=["as it is", "no half precision"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reordered_weights_give_the_same_product(
    dtype: torch.dtype, can_multiply: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_multiply:
        monkeypatch.setattr(onednn, "_can_multiply", lambda dtype: dtype == torch.float32)
    torch.manual_seed(0)
    dense = nn.Parameter(torch.randn(72, 40, dtype=dtype), requires_grad=False)
    weight = reordered(dense)
    assert weight.shape == dense.shape
    if not can_multiply and weight.is_mkldnn:
        assert weight.dtype == torch.float32
    assert torch.equal(weight.to_dense().to(dtype), dense)
    bias, x = torch.randn(72, dtype=dtype), torch.randn(9, 40, dtype=dtype)
    for rows in (1, 3, 9):
        expected = F.linear(x[:rows].double(), dense.double(), bias.double())
        torch.testing.assert_close(linear(x[:rows], weight, bias), expected.to(dtype))


@pytest.mark.parametrize(
    ("capability", "has_bf16", "expected"),
    [("AVX2", False, True), ("AVX512", True, True), ("AVX512", False, False)],
)
def test_bf16_that_onednn_only_converts_counts_as_none(
    capability: str, has_bf16: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AVX2 it says that it can only where there are instructions."""
    monkeypatch.setattr(onednn, "_can_multiply", lambda dtype: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16, raising=False)
    assert onednn._has_instructions(torch.bfloat16) == expected
    assert onednn._has_instructions(torch.float16)


@pytest.mark.skipif(not onednn._has_onednn(), reason="weights stay as they are")
def test_weights_stay_as_they_are_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_can_multiply", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(onednn, "host_memory", lambda: HostMemory(1200, 4000))
    for size, is_kept in ((4, False), (6, True)):  # 128 bytes for two in fp32, 288
        weight = nn.Parameter(torch.ones(size, size, dtype=torch.bfloat16), requires_grad=False)
        assert (reordered(weight) is weight) == is_kept


@pytest.mark.skipif(
    not (onednn._has_onednn() and onednn._can_multiply(torch.bfloat16)),
    reason="oneDNN cannot multiply in bf16",
)
@pytest.mark.parametrize(("available", "dtype"), [(4000, torch.float32), (1000, torch.bfloat16)])
def test_bf16_without_instructions_becomes_fp32_where_memory_allows(
    available: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_has_instructions", lambda dtype: False)
    monkeypatch.setattr(onednn, "host_memory", lambda: HostMemory(available, 4000))
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
    assert reordered(weight).is_mkldnn
    assert reordered(weight).dtype == dtype


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", (9000, 10_000)), ("5000", (1700, 5000)), ("20000", (9000, 10_000)), ("1", (0, 1))],
)
def test_host_memory_is_that_of_the_container(
    limit: str, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=9000, total=10_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_memory_module, "CGROUP", tmp_path)
    assert host_memory() == HostMemory(9000, 10_000), "there is no cgroup"
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 700\n")
    assert host_memory() == HostMemory(*expected)


def test_benchmark_prints_both_rates_and_their_ratio(
    tiny_qwen3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    options = "--batch 3 --tokens 4 --prefill 20 --repeats 1 --threads 1"
    try:
        cpu.main(["--model", str(tiny_qwen3), *options.split()])
    finally:
        torch.set_num_threads(threads)
    about, *results = capsys.readouterr().out.splitlines()
    assert "threads 1," in about
    assert torch.__version__ in about
    assert [result.partition(":")[0] for result in results] == ["decode 3 x 4", "prefill 20"]
    for result in results:
        found = re.search(r"transformers ([\d.]+) tok/s, nanovllm ([\d.]+) tok/s, ratio", result)
        assert found, result
        assert min(float(rate) for rate in found.groups()) > 0
