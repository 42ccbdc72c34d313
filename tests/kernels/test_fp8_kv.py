"""Tests the attention kernels, and the kernel before them, on K/V in 8 bits against torch."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from nanovllm.engine.shared_prefix import PrefixGroup, plan_prefixes
from nanovllm.layers.attention import LayerCache, store_kv
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context, SharedPrefixes
from tests.helpers.kernel_cases import DEVICE, HAS_GPU, assert_near, dtypes, randn

pytest.importorskip("triton")
from nanovllm.kernels.decode_attention import decode_attention
from nanovllm.kernels.decode_launch import decode_config
from nanovllm.kernels.prefill_attention import prefill_attention
from nanovllm.kernels.prefill_launch import LONG, SHORT, SPLIT, PrefillConfig
from nanovllm.kernels.qkv import norm_rope_store
from nanovllm.kernels.shared_prefix import members_per_item

# (heads, kv_heads, head_dim): a head whose padding is read masked, GQA ratios 1, 2, 4, 7
shapes = pytest.mark.parametrize(
    "shape", [(7, 1, 24), (4, 2, 64)] + [(16, 8, 128), (32, 8, 128), (8, 8, 256)] * HAS_GPU, ids=str
)


@dataclass
class Pages:
    """Holds K/V in 8 bits in blocks in random order; slots without a token have scales of NaN."""

    cache: LayerCache
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    @classmethod
    def make(cls, lens: list[int], block_size: int, kv_heads: int, head_dim: int) -> "Pages":
        """Tokens differ in size by up to 2^12, and a channel of K is 50 times as large."""
        need = [-(-n // block_size) for n in lens]
        order = list(range(sum(need)))
        random.Random(0).shuffle(order)
        shape = sum(need), block_size, kv_heads
        codes = torch.randint(0, 256, (2, *shape, head_dim), dtype=torch.uint8)
        scales = torch.full((shape[0], kv_heads, block_size, 2), float("nan"))
        cache = LayerCache(*codes.to(DEVICE), scales.to(DEVICE, torch.bfloat16))
        tables = torch.full((len(lens), max(need) + 1), -(2**30), dtype=torch.int32)
        for i, n in enumerate(lens):
            ids, order = order[: need[i]], order[need[i] :]
            tables[i, : need[i]] = torch.tensor(ids, dtype=torch.int32)
            positions = torch.arange(n)
            slots = tables[i, positions // block_size].long() * block_size + positions % block_size
            k, v = randn(2, n, kv_heads, head_dim, dtype=torch.float32, seed=i)
            k[..., 3] *= 50
            size = torch.exp2(randn(n, 1, 1, dtype=torch.float32, seed=i).clamp(-2, 2) * 3)
            store_kv(k, v * size, cache, slots.to(DEVICE))
        context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        return cls(cache, tables.to(DEVICE), context_lens)

    def context(self, lens_q: list[int] | None = None) -> Context:
        return Context(
            slot_mapping=self.context_lens,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            max_seqlen_k=int(self.context_lens.max()),
            cu_seqlens_q=None if lens_q is None else cumulative(lens_q),
            cu_seqlens_k=cumulative(self.context_lens.tolist()),
            max_seqlen_q=max(lens_q or [1]),
        )


def cumulative(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32)


@dtypes
@pytest.mark.parametrize("block_size", [16, 256])
@shapes
def test_decode_attention(shape: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    if not HAS_GPU and (block_size == 256) != (dtype == torch.float32):
        pytest.skip("the interpreter takes long: one block size for each dtype")
    heads, kv_heads, head_dim = shape
    lens = [1, 0, 17, 257] + [1900, 640] * HAS_GPU
    pages = Pages.make(lens, block_size, kv_heads, head_dim)
    q = randn(len(lens), heads + 2, head_dim, dtype=dtype, seed=1)[:, :heads]  # strided
    reference = TorchBackend().decode(q.float(), pages.cache, 0.2, pages.context())
    for num_splits in (1, 3) + (16, None) * HAS_GPU:
        out = decode_attention(
            q,
            pages.cache.k,
            pages.cache.v,
            pages.block_tables,
            pages.context_lens,
            0.2,
            num_splits,
            kv_scales=pages.cache.scales,
        )
        assert_near(out, reference, dtype)
        assert not out[1].any(), "a padding row must give zeros"


@pytest.mark.parametrize("num_programs", [1, 80, 920])  # both kinds of tiles, split or not
@pytest.mark.parametrize("block_size", [1, 32])
def test_decode_attention_in_every_launch(
    block_size: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = decode_config(num_programs, kv_itemsize=1)
    if not HAS_GPU:
        config = replace(config, splits=min(config.splits, 2))
    monkeypatch.setattr("nanovllm.kernels.decode_attention.decode_config", lambda *_, **__: config)
    pages = Pages.make([0, 130, 40 * block_size], block_size, 1, 64)
    q = randn(3, 2, 64, dtype=torch.float16, seed=1)
    tables, lens, cache = pages.block_tables, pages.context_lens, pages.cache
    reference = TorchBackend().decode(q.float(), cache, 0.2, pages.context())
    out = decode_attention(q, cache.k, cache.v, tables, lens, 0.2, kv_scales=cache.scales)
    assert_near(out, reference, torch.float16)


@dtypes
@pytest.mark.parametrize("launch", [(SHORT, 1), (LONG, 1), (SPLIT, 3)])
@pytest.mark.parametrize("block_size", [16, 256])
@shapes
def test_prefill_attention(
    shape: tuple[int, int, int],
    block_size: int,
    launch: tuple[PrefillConfig, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, kv_heads, head_dim = shape
    config, splits = launch
    if dtype == torch.float32 or head_dim > 128:
        config = replace(config, queries=32, tile=16, warps=4, stages=2, registers=None)
    if not HAS_GPU and ((block_size == 256) != (splits == 1) or dtype == torch.float32):
        pytest.skip("the interpreter takes long: half precision, one block size for each launch")
    path = "nanovllm.kernels.prefill_attention.prefill_config"
    monkeypatch.setattr(path, lambda *_: (config, splits))
    lens_q, lens_k = [1, 0, 35, 5], [1, 0, 35, 90]
    if HAS_GPU:
        lens_q, lens_k = [*lens_q, 1, 700], [*lens_k, 1800, 1100]
    pages = Pages.make(lens_k, block_size, kv_heads, head_dim)
    q = randn(sum(lens_q), heads + 2, head_dim, dtype=dtype, seed=1)[:, :heads]
    context, cache = pages.context(lens_q), pages.cache
    reference = TorchBackend().prefill(q.float(), q, q, cache, 0.2, context)
    assert context.cu_seqlens_q is not None
    assert context.cu_seqlens_k is not None
    cu_seqlens = context.cu_seqlens_q, context.cu_seqlens_k
    tables, longest = pages.block_tables, max(lens_k)
    out = prefill_attention(
        q, cache.k, cache.v, tables, *cu_seqlens, longest, 0.2, kv_scales=cache.scales
    )
    assert_near(out, reference, dtype)


@dtypes
@shapes
def test_shared_prefixes_change_no_result(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    block_size, num_shared = 16, 3
    pages = Pages.make([80, 90, 49, 65], block_size, kv_heads, head_dim)
    pages.block_tables[:3, :num_shared] = pages.block_tables[0, :num_shared].clone()
    q = randn(4, heads, head_dim, dtype=dtype, seed=1)
    plan = plan_prefixes(
        [PrefixGroup([0, 1, 2], num_shared)],
        num_rows=4,
        block_size=block_size,
        members_per_item=members_per_item(heads // kv_heads),
        max_items=2,
        enough_items=1,
    )
    arrays = plan.items, plan.members, plan.rows
    prefixes = SharedPrefixes(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    cache, lens = pages.cache, pages.context_lens
    expected, out = (
        decode_attention(
            q, cache.k, cache.v, pages.block_tables, lens, 0.2, 1, shared, cache.scales
        )
        for shared in (None, prefixes)
    )
    assert_near(out, expected, dtype)


@dtypes
@shapes
def test_norm_rope_store(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Stores the same bytes as torch, and leaves in place what these stand for."""
    heads, kv_heads, head_dim = shape
    t, block_size = 7, 16
    qkv = randn(t, heads + 2 * kv_heads, head_dim, dtype=dtype)
    qkv[0, heads + kv_heads :] = 0  # V of zeros
    qkv[2, heads + kv_heads :, 0] = 252 * 4  # a scale that is a power of two
    positions = torch.zeros(t, dtype=torch.int64, device=DEVICE)  # no rotation, so no rounding
    slots = torch.tensor([3, -1, 47, 0, 31, 16, -1], device=DEVICE)
    with DEVICE:
        rotary = RotaryEmbedding(head_dim, 128, 10000.0)
    expected, out = (
        LayerCache(
            torch.full((3, block_size, kv_heads, head_dim), 7, dtype=torch.uint8, device=DEVICE),
            torch.full((3, block_size, kv_heads, head_dim), 7, dtype=torch.uint8, device=DEVICE),
            torch.full((3, kv_heads, block_size, 2), 7, dtype=torch.bfloat16, device=DEVICE),
        )
        for _ in range(2)
    )
    q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
    k, v = store_kv(k, v, expected, slots)
    norm_rope_store(qkv, positions, slots, rotary.cos_sin, None, 0.0, *out, out.scales)
    assert torch.equal(out.k, expected.k)
    assert torch.equal(out.v, expected.v)
    assert out.scales is not None
    assert expected.scales is not None
    assert torch.equal(out.scales, expected.scales)
    assert torch.equal(qkv, torch.cat((q, k, v), dim=1))
