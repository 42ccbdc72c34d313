"""Tests the flash-attn backend without the package: what it asks of the package gives causal
attention, and what the package cannot do is refused with the fix."""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.layers.attention import LayerCache
from nanovllm.layers.attention_backends import AttentionLayout, select_backend, unfit_reason
from nanovllm.layers.attention_backends.flash_attn import FlashAttnBackend
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.utils.context import Context
from tests.helpers.closeness import assert_close

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE = 4, 2, 16, 256, 0.3


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attends by the formula; the last of `q` [n, heads, d] sees all of `keys` [length, kv, d]."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", q, keys) * scale
    is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(keys) - len(q) + 1)
    return torch.einsum(
        "hnl,lhd->nhd", scores.masked_fill(is_later, -torch.inf).softmax(-1), values
    )


def pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    return torch.cat([cache[block] for block in table[: -(-length // BLOCK_SIZE)]])[:length]


def varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    block_table: Tensor | None,
) -> Tensor:  # fmt: skip
    """Does what flash-attn's documentation says of `flash_attn_varlen_func`."""
    assert causal
    assert {x.dtype for x in (cu_seqlens_q, cu_seqlens_k)} == {torch.int32}
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs = []
    for i in range(len(starts_q) - 1):
        new, length = q[starts_q[i] : starts_q[i + 1]], starts_k[i + 1] - starts_k[i]
        assert len(new) <= max_seqlen_q
        assert length <= max_seqlen_k
        if block_table is None:
            keys, values = (x[starts_k[i] : starts_k[i + 1]] for x in (k, v))
        else:
            keys, values = (pages(x, block_table[i], length) for x in (k, v))
        outs.append(attend(new, keys, values, softmax_scale))
    return torch.cat(outs)


def with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
    softmax_scale: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Does what flash-attn's documentation says of `flash_attn_with_kvcache`."""
    assert causal
    assert {x.dtype for x in (cache_seqlens, block_table)} == {torch.int32}
    outs = []
    for new, length, table in zip(q, cache_seqlens.tolist(), block_table, strict=True):
        keys, values = (pages(cache, table, length) for cache in (k_cache, v_cache))
        outs.append(attend(new, keys, values, softmax_scale))
    return torch.stack(outs)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashAttnBackend:
    package: Any = ModuleType("flash_attn")
    package.flash_attn_varlen_func, package.flash_attn_with_kvcache = varlen, with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return FlashAttnBackend()


@pytest.fixture
def cached() -> tuple[LayerCache, Tensor, list[int]]:
    """Returns a cache, block tables and context lengths of three sequences in shuffled blocks."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(2, 5, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=generator)
    tables = torch.tensor([[3, 0], [4, 4], [1, 2]], dtype=torch.int32)
    return LayerCache(*pool), tables, [300, 7, 257]


@pytest.mark.parametrize("is_paged", [True, False])
def test_prefill(
    is_paged: bool, backend: FlashAttnBackend, cached: tuple[LayerCache, Tensor, list[int]]
) -> None:
    cache, tables, lens = cached
    lens_q = [20, 7, 1] if is_paged else lens
    cu_q, cu_k = (torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (lens_q, lens))
    context = Context(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables if is_paged else None,
        max_seqlen_k=max(lens),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(lens_q),
    )
    q = torch.randn(sum(lens_q), HEADS, HEAD_DIM)
    k, v = torch.randn(2, sum(lens_q), KV_HEADS, HEAD_DIM)
    expected = TorchBackend().prefill(q, k, v, cache, SCALE, context)
    assert_close(backend.prefill(q, k, v, cache, SCALE, context), expected, num_eps=32)


def test_decode(backend: FlashAttnBackend, cached: tuple[LayerCache, Tensor, list[int]]) -> None:
    cache, tables, lens = cached
    context = Context(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
        max_seqlen_k=max(lens),
    )
    q = torch.randn(len(lens), HEADS, HEAD_DIM)
    expected = TorchBackend().decode(q, cache, SCALE, context)
    assert_close(backend.decode(q, cache, SCALE, context), expected, num_eps=32)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> AttentionLayout:
    """Simulates an Ampere GPU with all packages; returns a layout that suits all backends there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return AttentionLayout(torch.device("cuda"), torch.bfloat16, HEAD_DIM, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16}, None),
        (
            {"dtype": torch.float32},
            "dtype torch.float32 is neither float16 nor bfloat16; use 'triton'",
        ),
        ({"block_size": 16}, "kvcache_block_size=16 is no multiple of 256; use 256, or 'triton'"),
        ({"head_dim": 20}, "head_dim=20 is no multiple of 8; use 'triton'"),
        ({"head_dim": 264}, "head_dim=264 exceeds 256; use 'torch'"),
        ({"device": torch.device("cpu")}, "it needs a CUDA GPU, the device is 'cpu'; use 'torch'"),
    ],
)
def test_what_it_cannot_do_is_said(
    changes: dict[str, Any], reason: str | None, on_gpu: AttentionLayout
) -> None:
    layout = replace(on_gpu, **changes)
    assert unfit_reason("flash_attn", layout) == reason
    if reason is not None:
        with pytest.raises(ValueError, match="attention backend 'flash_attn' cannot be used: "):
            select_backend("flash_attn", layout)


def test_without_the_package_the_fix_is_named_and_auto_takes_another(
    on_gpu: AttentionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "flash_attn" else name
    )
    with pytest.raises(ValueError, match="flash-attn is not installed; pip install flash-attn"):
        select_backend("flash_attn", on_gpu)
    assert select_backend("auto", on_gpu).name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert select_backend("auto", on_gpu).name == "torch"
