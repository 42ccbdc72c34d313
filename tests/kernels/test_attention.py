"""Tests the attention kernels, and the kernel before them, against their torch counterparts."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nanovllm.layers.attention import LayerCache, store_kv
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.layers.attention_backends.triton import TritonBackend
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context
from tests.helpers.kernel_cases import DEVICE, DTYPES, HAS_GPU, assert_near, dtypes, randn, shapes

pytest.importorskip("triton")
from nanovllm.kernels.decode_attention import decode_attention
from nanovllm.kernels.decode_launch import CONFIGS, DecodeConfig, decode_config
from nanovllm.kernels.dependent_launch import FEW_TOKENS
from nanovllm.kernels.prefill_attention import prefill_attention
from nanovllm.kernels.prefill_launch import (
    FEW,
    LONG,
    SHORT,
    SMALL_GPU,
    SPLIT,
    PrefillConfig,
    max_tiles,
    prefill_config,
)
from nanovllm.kernels.qkv import norm_rope_store


@pytest.fixture(autouse=True)
def few_splits_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other, so that 32 splits would take minutes."""

    def few_splits(*args: Any, **kwargs: Any) -> DecodeConfig:
        config = decode_config(*args, **kwargs)
        return replace(config, splits=min(config.splits, 3))

    if not HAS_GPU:
        monkeypatch.setattr("nanovllm.kernels.decode_attention.decode_config", few_splits)


@dataclass
class Pages:
    """Holds a random K/V pool, poisoned in all slots that hold no token, and its block tables."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    @classmethod
    def make(
        cls, lens: list[int], block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "Pages":
        need = [-(-n // block_size) for n in lens]
        order = list(range(sum(need)))
        random.Random(0).shuffle(order)
        tables = torch.full((len(lens), max(need) + 1), -(2**30), dtype=torch.int32)
        caches = randn(2, sum(need), block_size, kv_heads, head_dim, dtype=dtype)
        for i, n in enumerate(lens):
            ids, order = order[: need[i]], order[need[i] :]
            tables[i, : need[i]] = torch.tensor(ids, dtype=torch.int32)
            if n % block_size:
                caches[:, ids[-1], n % block_size :] = float("nan")
        context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        return cls(caches[0], caches[1], tables.to(DEVICE), context_lens)

    def cache_in_fp32(self) -> LayerCache:
        return LayerCache(self.k_cache.float(), self.v_cache.float())

    def context(self, lens_q: list[int] | None = None) -> Context:
        cu_q = None if lens_q is None else cumulative(lens_q)
        longest = int(self.context_lens.max())
        return Context(
            slot_mapping=self.context_lens,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            max_seqlen_k=longest,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cumulative(self.context_lens.tolist()),
            max_seqlen_q=max(lens_q or [1]),
        )


def cumulative(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32)


@dtypes
@pytest.mark.parametrize("block_size", [16, 256] + [1, 64] * HAS_GPU)
@shapes
def test_decode_attention(shape: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    if not HAS_GPU and (block_size == 256) != (dtype == torch.float32):
        pytest.skip("the interpreter takes long: one block size for each dtype")
    heads, kv_heads, head_dim = shape
    lens = [1, 0, 17, 255, 256, 257] + [1900, 3, 640] * HAS_GPU
    pages = Pages.make(lens, block_size, kv_heads, head_dim, dtype)
    # the rows are strided, as in a view of the QKV projection
    q = randn(len(lens), heads + 2, head_dim, dtype=dtype, seed=1)[:, :heads]
    reference = TorchBackend().decode(q.float(), pages.cache_in_fp32(), 0.2, pages.context())
    for num_splits in (1, 2, 32) + (16, None) * HAS_GPU:
        out = decode_attention(
            q,
            pages.k_cache,
            pages.v_cache,
            pages.block_tables,
            pages.context_lens,
            0.2,
            num_splits,
        )
        assert_near(out, reference, dtype)
        assert not out[1].any(), "a padding row must give zeros"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("num_programs", [least for least, _ in CONFIGS])
@pytest.mark.parametrize("block_size", [1, 32])
def test_decode_attention_in_every_launch(
    block_size: int, num_programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles and blocks of all sizes are combined, and a sequence has more blocks than a kernel
    looks up at a time."""
    config = decode_config(num_programs)
    if not HAS_GPU:
        config = replace(config, splits=min(config.splits, 3))
    monkeypatch.setattr("nanovllm.kernels.decode_attention.decode_config", lambda *_, **__: config)
    lens = [1, 0, 130, 40 * block_size]
    pages = Pages.make(lens, block_size, 1, 64, dtype)
    q = randn(len(lens), 2, 64, dtype=dtype, seed=1)
    cached = pages.k_cache, pages.v_cache
    context = pages.context()
    reference = TorchBackend().decode(q.float(), pages.cache_in_fp32(), 0.2, context)
    for num_splits in (1, 3, None):
        tables, context_lens = pages.block_tables, pages.context_lens
        out = decode_attention(q, *cached, tables, context_lens, 0.2, num_splits)
        assert_near(out, reference, dtype)


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("max_num_seqs", [1, 100, 600])
def test_decode_sizes_need_every_kernel(max_num_seqs: int, kv_heads: int) -> None:
    def kernel(n: int) -> tuple[object, bool]:
        return decode_config(n * kv_heads).compiled_as, n <= FEW_TOKENS

    sizes = TritonBackend().decode_sizes(max_num_seqs, kv_heads)
    needed = {kernel(n + 1) for n in range(max_num_seqs)}
    assert {kernel(n) for n in sizes} == needed
    assert len(sizes) == len(needed)
    assert all(1 <= size <= max_num_seqs for size in sizes)


@dtypes
@pytest.mark.parametrize("block_size", [16, 256] + [1, 64] * HAS_GPU)
@shapes
def test_prefill_attention_with_cached_prefixes(
    shape: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim = shape
    lens_q, lens_k = [1, 5, 130, 17], [1, 69, 130, 144]
    if HAS_GPU:
        lens_q, lens_k = [*lens_q, 1, 700], [*lens_k, 1800, 1100]
    pages = Pages.make(lens_k, block_size, kv_heads, head_dim, dtype)
    q = randn(sum(lens_q), heads + 2, head_dim, dtype=dtype, seed=1)[:, :heads]
    context = pages.context(lens_q)
    cache = pages.cache_in_fp32()
    reference = TorchBackend().prefill(q.float(), *cache, cache, 0.2, context)
    assert context.cu_seqlens_q is not None
    assert context.cu_seqlens_k is not None
    out = prefill_attention(
        q,
        pages.k_cache,
        pages.v_cache,
        pages.block_tables,
        context.cu_seqlens_q,
        context.cu_seqlens_k,
        max(lens_k),
        0.2,
    )
    assert_near(out, reference, dtype)


@dtypes
@shapes
def test_prefill_attention_over_fresh_kv(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    lens = [3, 140, 1, 64] + [1000] * HAS_GPU
    qkv = randn(sum(lens), heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cu = cumulative(lens)
    context = Context(
        slot_mapping=cu,
        context_lens=torch.tensor(lens),
        block_tables=None,
        max_seqlen_k=max(lens),
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=max(lens),
    )
    no_cache = LayerCache(torch.empty(0), torch.empty(0))
    reference = TorchBackend().prefill(q.float(), k.float(), v.float(), no_cache, 0.2, context)
    assert_near(prefill_attention(q, k, v, None, cu, cu, max(lens), 0.2), reference, dtype)


@dataclass
class Prefill:
    """Holds the new tokens of some sequences with cached prefixes, and what attention gives."""

    pages: Pages
    q: torch.Tensor
    context: Context
    reference: torch.Tensor

    @classmethod
    def make(
        cls, lens_q: list[int], lens_k: list[int], block_size: int, dtype: torch.dtype
    ) -> "Prefill":
        pages = Pages.make(lens_k, block_size, 1, 64, dtype)
        q = randn(sum(lens_q), 2, 64, dtype=dtype, seed=1)
        context, cache = pages.context(lens_q), pages.cache_in_fp32()
        reference = TorchBackend().prefill(q.float(), *cache, cache, 0.2, context)
        return cls(pages, q, context, reference)

    def run(self, max_seqlen_k: int, num_padding: int = 0) -> torch.Tensor:
        """Runs the kernel with `num_padding` tokens and as many sequences more."""
        cu_q, cu_k = self.context.cu_seqlens_q, self.context.cu_seqlens_k
        assert cu_q is not None
        assert cu_k is not None
        # Padding sequences have no new tokens; their block tables must not be read.
        cu_q, cu_k = (torch.cat((cu, cu[-1:].expand(num_padding))) for cu in (cu_q, cu_k))
        poison = torch.full_like(self.pages.block_tables[:1], -(2**30)).expand(num_padding, -1)
        tables = torch.cat((self.pages.block_tables, poison))
        q = torch.cat((self.q, self.q.new_full((num_padding, 2, 64), float("nan"))))
        pages = self.pages
        out = prefill_attention(
            q, pages.k_cache, pages.v_cache, tables, cu_q, cu_k, max_seqlen_k, 0.2
        )
        return out[: len(self.q)]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("launch", [(SHORT, 1), (LONG, 1), (FEW, 1), (SPLIT, 3), (SMALL_GPU, 2)])
@pytest.mark.parametrize("block_size", [1, 32, 128])
def test_prefill_attention_in_every_launch(
    block_size: int,
    launch: tuple[PrefillConfig, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with an empty sequence among the others, and with padding."""
    path = "nanovllm.kernels.prefill_attention.prefill_config"
    monkeypatch.setattr(path, lambda *_: launch)
    case = Prefill.make([20, 0, 1, 70, 3], [200, 0, 131, 70, 40], block_size, dtype)
    assert_near(case.run(200, num_padding=3), case.reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("is_long_first", [True, False])
def test_prefill_attention_of_a_long_prompt_beside_many_short_ones(
    is_long_first: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.kernels.prefill_attention.SEQS", 8)
    lens = [150] + [2, 1, 33, 0] * 5
    lens = lens if is_long_first else lens[::-1]
    case = Prefill.make(lens, lens, 256, dtype)
    assert_near(case.run(max(lens)), case.reference, dtype)


@pytest.mark.parametrize("tokens", [1, 3, 32])
def test_tiles_have_room_in_the_list(tokens: int) -> None:
    """Each tile of each sequence has its own place in the list, and the list has a bound."""
    rng = random.Random(tokens)
    for _ in range(50):
        lens = [rng.choice([0, 1, tokens, rng.randint(0, 100)]) for _ in range(rng.randint(1, 9))]
        starts = [sum(lens[:s]) // tokens + s for s in range(len(lens) + 1)]
        for s, length in enumerate(lens):
            assert starts[s] + -(-length // tokens) <= starts[s + 1]
        assert starts[-1] <= max_tiles(sum(lens), len(lens), tokens)


@pytest.mark.parametrize("num_tokens", [1, 20, 500, 16000])
@pytest.mark.parametrize("num_seqs", [1, 400])
def test_keys_are_split_where_tiles_are_few(num_tokens: int, num_seqs: int) -> None:
    q = torch.empty(num_tokens, 16, 128, dtype=torch.float16, device="meta")
    _, splits = prefill_config(q, num_seqs, 8, 32788, is_paged=True)
    is_few = num_tokens <= 500 and num_seqs == 1
    assert (splits > 1) == is_few
    assert prefill_config(q, num_seqs, 8, 400, is_paged=True)[1] == 1, "short contexts"
    assert prefill_config(q, num_seqs, 8, 32788, is_paged=False)[1] == 1


@dtypes
@pytest.mark.parametrize("has_norm", [True, False])
@shapes
def test_norm_rope_store(shape: tuple[int, int, int], has_norm: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    t, block_size = 7, 16
    qkv = randn(t, heads + 2 * kv_heads, head_dim, dtype=dtype)
    positions = torch.tensor([0, 5, 99, 3, 4, 17, 31], device=DEVICE)
    slots = torch.tensor([3, -1, 47, 0, 31, 16, -1], device=DEVICE)
    norms = [RMSNorm(head_dim, 1e-6).to(DEVICE, dtype) for _ in range(2)]
    for i, norm in enumerate(norms):
        norm.weight.data = randn(head_dim, dtype=dtype, seed=i + 1)
    with DEVICE:
        rotary = RotaryEmbedding(head_dim, 128, 10000.0)
    caches = [randn(3, block_size, kv_heads, head_dim, dtype=dtype, seed=9) for _ in range(4)]

    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if has_norm:
        q, k = norms[0](q), norms[1](k)
    q, k = rotary(positions, q), rotary(positions, k)
    stored = slots >= 0
    store_kv(k[stored], v[stored], LayerCache(*caches[:2]), slots[stored])

    weights = (norms[0].weight.data, norms[1].weight.data) if has_norm else None
    v = v.clone()
    norm_rope_store(qkv, positions, slots, rotary.cos_sin, weights, 1e-6, caches[2], caches[3])
    for out, expected in (
        (qkv[:, :heads], q),
        (qkv[:, heads : heads + kv_heads], k),
        (caches[2], caches[0]),
    ):
        assert_near(out, expected, dtype)
    assert torch.equal(qkv[:, heads + kv_heads :], v)
    assert torch.equal(caches[3], caches[1])


@pytest.mark.gpu
@pytest.mark.alone
def test_pool_beyond_two_to_the_31_elements() -> None:
    """Element offsets past 2**31 must not wrap around when K/V are stored and read by attention."""
    kv_heads, head_dim, block_size = 8, 128, 256
    num_blocks = 2**31 // (block_size * kv_heads * head_dim) + 9
    shape = 2, num_blocks, block_size, kv_heads, head_dim
    caches = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    t = 300
    qkv = randn(t, 16 + 2 * kv_heads, head_dim, dtype=torch.bfloat16)
    table = torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(t, device=DEVICE)
    slots = table[0, positions // block_size].long() * block_size + positions % block_size
    with DEVICE:
        rotary = RotaryEmbedding(head_dim, 512, 10000.0)
    norm_rope_store(qkv, positions, slots, rotary.cos_sin, None, 0.0, caches[0], caches[1])
    q, k, v = qkv.split([16, kv_heads, kv_heads], dim=1)
    assert torch.equal(caches[1, -1], v[:256])
    assert torch.equal(caches[0, -2, :44], k[256:])
    lens = torch.tensor([t], dtype=torch.int32, device=DEVICE)
    last = q[-1:].contiguous()
    out = decode_attention(last, caches[0], caches[1], table, lens, 0.1)
    cu = cumulative([t])
    expected = prefill_attention(q, k, v, None, cu, cu, t, 0.1)
    assert_near(out, expected[-1:], torch.bfloat16)
    paged = prefill_attention(q, caches[0], caches[1], table, cu, cu, t, 0.1)
    assert_near(paged, expected, torch.bfloat16)
