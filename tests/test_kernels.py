"""Each Triton kernel against its torch counterpart: on a GPU, else under Triton's interpreter.

The interpreter runs small grids in fp32 and fp16 (its bf16 `tl.dot` is wrong); with a GPU the same
tests also run the full grids and bf16.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from nanovllm.layers.activation import silu_and_mul as torch_silu_and_mul
from nanovllm.layers.attention import store_kv
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.sampler import best_tokens
from nanovllm.utils.context import Context
from nanovllm.utils.distributed import TPGroup

pytest.importorskip("triton")
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_attention import decode_attention
from nanovllm.kernels.embedding import embed_share
from nanovllm.kernels.layernorm import add_rms_norm
from nanovllm.kernels.linear import CANDIDATES, Slices, Tiling
from nanovllm.kernels.prefill_attention import prefill_attention
from nanovllm.kernels.qkv import norm_rope_store
from nanovllm.kernels.rows import decode_inputs
from nanovllm.kernels.sampler import sample

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_GPU
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# (heads, kv_heads, head_dim): head sizes, GQA ratios 1, 2, 7, 8, K/V widths 72, 192, 1024
SHAPES = [(3, 3, 24), (6, 3, 64), (8, 1, 40), (7, 1, 80)]
GPU_SHAPES = [(16, 8, 128), (9, 3, 64), (14, 2, 96), (32, 4, 256), (8, 8, 128), (7, 1, 24)]
shapes = pytest.mark.parametrize("shape", SHAPES + GPU_SHAPES * HAS_GPU, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.shape == expected.shape
    assert out.isfinite().all()
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@dataclass
class Pages:
    """A random pool, poisoned wherever no sequence has a token, and tables over it."""

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
    heads, kv_heads, head_dim = shape
    lens = [1, 0, 17, 255, 256, 257] + [1900, 3, 640] * HAS_GPU
    pages = Pages.make(lens, block_size, kv_heads, head_dim, dtype)
    # strided rows, as a view of the QKV projection has
    q = randn(len(lens), heads + 2, head_dim, dtype=dtype, seed=1)[:, :heads]
    reference = TorchBackend().decode(
        q.float(), pages.k_cache.float(), pages.v_cache.float(), 0.2, pages.context()
    )
    for num_splits in (1, 2, 16, 32, None):
        out = decode_attention(
            q,
            pages.k_cache,
            pages.v_cache,
            pages.block_tables,
            pages.context_lens,
            0.2,
            num_splits,
        )
        assert_close(out, reference, dtype)
        assert not out[1].any(), "a padding row must give zeros"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("has_many", [True, False])
@pytest.mark.parametrize("block_size", [1, 32])
def test_decode_attention_of_many_programs(
    block_size: int, has_many: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of any size meet blocks of any size, and more blocks than are looked up at a time."""
    for name in ("MANY_PROGRAMS", "MERGED_PROGRAMS"):
        monkeypatch.setattr(f"nanovllm.kernels.decode_attention.{name}", 0 if has_many else 10**6)
    lens = [1, 0, 130, 40 * block_size]
    pages = Pages.make(lens, block_size, 1, 64, dtype)
    q = randn(len(lens), 2, 64, dtype=dtype, seed=1)
    cached = pages.k_cache, pages.v_cache
    context = pages.context()
    reference = TorchBackend().decode(q.float(), cached[0].float(), cached[1].float(), 0.2, context)
    for num_splits in (1, 3):
        tables, context_lens = pages.block_tables, pages.context_lens
        out = decode_attention(q, *cached, tables, context_lens, 0.2, num_splits)
        assert_close(out, reference, dtype)


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
    k_cache, v_cache = pages.k_cache.float(), pages.v_cache.float()
    reference = TorchBackend().prefill(q.float(), k_cache, v_cache, k_cache, v_cache, 0.2, context)
    assert context.cu_seqlens_q is not None
    assert context.cu_seqlens_k is not None
    out = prefill_attention(
        q,
        pages.k_cache,
        pages.v_cache,
        pages.block_tables,
        context.cu_seqlens_q,
        context.cu_seqlens_k,
        max(lens_q),
        0.2,
    )
    assert_close(out, reference, dtype)


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
    empty = torch.empty(0)
    reference = TorchBackend().prefill(q.float(), k.float(), v.float(), empty, empty, 0.2, context)
    assert_close(prefill_attention(q, k, v, None, cu, cu, max(lens), 0.2), reference, dtype)


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
    store_kv(k[stored], v[stored], caches[0], caches[1], slots[stored])

    weights = (norms[0].weight.data, norms[1].weight.data) if has_norm else None
    v = v.clone()
    norm_rope_store(qkv, positions, slots, rotary.cos_sin, weights, 1e-6, caches[2], caches[3])
    for out, expected in (
        (qkv[:, :heads], q),
        (qkv[:, heads : heads + kv_heads], k),
        (caches[2], caches[0]),
    ):
        assert_close(out, expected, dtype)
    assert torch.equal(qkv[:, heads + kv_heads :], v)
    assert torch.equal(caches[3], caches[1])


@dtypes
@pytest.mark.parametrize("size", [64, 72, 1024])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, residual = randn(5, size, dtype=dtype), randn(5, size, dtype=dtype, seed=1)
    norm = RMSNorm(size, 1e-6).to(DEVICE, dtype)
    norm.weight.data = randn(size, dtype=dtype, seed=2)
    total = x + residual
    assert_close(add_rms_norm(x, None, norm.weight.data, 1e-6)[0], norm(x), dtype)
    out, new_residual = add_rms_norm(x, residual.clone(), norm.weight.data, 1e-6)
    assert_close(out, norm(total), dtype)
    assert torch.equal(new_residual, total)
    if dtype != torch.float32:
        parts = torch.stack((x.float() * 0.25, x.float() * 0.5, x.float() * 0.25))  # exact
        out_of_parts = add_rms_norm(parts, residual, norm.weight.data, 1e-6)
        assert torch.equal(out_of_parts[1], total)
        assert torch.equal(out_of_parts[0], out)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("product", {p: 0 for ps in CANDIDATES.values() for p in ps}, ids=str)
def test_products(product: Tiling | Slices, dtype: torch.dtype) -> None:
    weight = randn(256, 1024, dtype=dtype)
    if not product.fits(weight):
        pytest.skip("for other GPUs")
    for num_rows in (1, 70) + (16, 200) * HAS_GPU:
        x = randn(num_rows, 1024, dtype=dtype, seed=num_rows)
        out, expected = product.multiply(x, weight), x.float() @ weight.float().T
        if product.splits > 1:
            assert out.shape == (product.splits, num_rows, 256)
            assert out.dtype == torch.float32
            out = out.sum(0)
        if product.is_gated:
            expected = torch_silu_and_mul(expected.cpu().to(dtype)).to(DEVICE)
        assert_close(out.to(dtype), expected, dtype)


def test_a_tiling_fits_what_it_divides() -> None:
    tiling = Tiling(16, 64, 64, stages=3, warps=4, splits=2)
    assert tiling.fits(torch.empty(192, 384, dtype=torch.float16))
    assert not tiling.fits(torch.empty(96, 384, dtype=torch.float16))
    assert not tiling.fits(torch.empty(192, 64 * 3, dtype=torch.float16))
    assert not replace(tiling, stages=99).fits(torch.empty(192, 384, dtype=torch.float16))


@dtypes
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_embed_share(rank: int, dtype: torch.dtype) -> None:
    """Shares of 34 of 100 ids, the last with two rows of padding; a size of more than a block."""
    table = randn(100, 1500, dtype=dtype)
    group = TPGroup(rank, 3)
    embedding = VocabParallelEmbedding(group, 100, 1500).to(DEVICE, dtype)
    weight, num_ids = embedding.weight.data, embedding.num_ids
    weight[:num_ids] = table[embedding.first_id :][:num_ids]
    token_ids = torch.tensor([0, 33, 34, 99, 67, 68, 33, 1], device=DEVICE)
    out = embed_share(token_ids, weight, embedding.first_id, num_ids)
    assert torch.equal(out, embedding.cpu()(token_ids.cpu()).to(DEVICE))
    is_mine = (token_ids // 34 == rank).unsqueeze(1)
    assert torch.equal(out, table[token_ids] * is_mine)


@dtypes
@pytest.mark.parametrize("size", [96, 1024, 3072])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(5, 2 * size, dtype=dtype)
    expected = torch_silu_and_mul(gate_up.cpu()).to(DEVICE)
    assert_close(silu_and_mul(gate_up), expected, dtype)


@dtypes
@pytest.mark.parametrize("vocab", [500, 9001])
def test_sampler_draws_what_torch_draws(vocab: int, dtype: torch.dtype) -> None:
    n, num_rows = 12, 20
    logits = randn(n, vocab, dtype=dtype)
    logits[3, 100:200] = logits[3].max() + 1  # a tie: the lowest id wins
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[:n]
    temperatures = torch.rand(num_rows, generator=torch.Generator().manual_seed(1)) * 2
    temperatures[rows[:6]] = 0
    seeds = torch.arange(num_rows) * 0x123456789ABCDEF - 2**62
    positions = torch.arange(num_rows) * 37
    _, expected = best_tokens(logits.cpu(), temperatures[rows], seeds[rows], positions[rows])
    rows_on_device = rows.clone().to(DEVICE)
    rows_on_device[5] = -1
    last_tokens = torch.full((num_rows,), -7, device=DEVICE)
    ids = sample(
        logits,
        rows_on_device,
        temperatures.to(DEVICE),
        seeds.to(DEVICE),
        positions.to(DEVICE),
        last_tokens,
    ).cpu()
    valid = torch.arange(n) != 5
    assert torch.equal(ids[valid], expected[valid])
    assert expected[3] == 100
    assert torch.equal(last_tokens.cpu()[rows[valid]], expected[valid])
    untouched = torch.ones(num_rows, dtype=torch.bool)
    untouched[rows[valid]] = False
    assert (last_tokens.cpu()[untouched] == -7).all()


@pytest.mark.parametrize("vocab", [9, 509, 9001])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sampler_with_shares_of_the_vocabulary(num_ranks: int, vocab: int) -> None:
    """As on one rank; padding never wins, not even over negative logits."""
    n, share = 8, -(-vocab // num_ranks)
    logits = randn(n, vocab, dtype=torch.float32) - 1000
    logits[1] = logits[2] = -2000  # a tie of all ranks
    logits[2, vocab // 2] = -0.0
    logits[2, 1] = 0.0
    rows = torch.arange(n, device=DEVICE)
    temperatures = torch.tensor([0, 0, 0, 0, 0.5, 1, 1.5, 2], device=DEVICE)
    seeds, positions = rows * 0x123456789ABCDEF, rows * 37
    state = (temperatures.cpu(), seeds.cpu(), positions.cpu())
    _, expected = best_tokens(logits.cpu(), *state)
    padded = torch.nn.functional.pad(logits, (0, num_ranks * share - vocab), value=float("-inf"))
    shares = [part.contiguous() for part in padded.split(share, dim=1)]

    def sample_on_each(gather: Callable[[torch.Tensor], torch.Tensor]) -> list[list[int]]:
        ids = []
        for rank, part in enumerate(shares):
            last_tokens = torch.zeros_like(rows)
            row_state = (temperatures, seeds, positions, last_tokens)
            sampled = sample(part, rows, *row_state, first_id=rank * share, gather=gather)
            assert torch.equal(sampled, last_tokens)
            ids.append(sampled.tolist())
        return ids

    bests: list[torch.Tensor] = []
    sample_on_each(lambda best: [bests.append(best), best.unsqueeze(0)][1])
    assert sample_on_each(lambda _: torch.stack(bests)) == [expected.tolist()] * num_ranks
    assert expected[1] == 0
    assert expected[2] == 1


@dtypes
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_gives_a_valid_id_where_no_logit_is_a_number(
    temperature: float, dtype: torch.dtype
) -> None:
    """An invalid one would be looked up in the embedding by the next step."""
    logits = torch.full((2, 5000), float("nan"), dtype=dtype, device=DEVICE)
    logits[1] = float("-inf")
    rows = torch.arange(2, device=DEVICE)
    state = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    temperatures = torch.full((2,), temperature, device=DEVICE)
    ids = sample(logits, rows, temperatures, state[0], state[1], state[2])
    assert ids.tolist() == [0, 0]


def test_decode_inputs() -> None:
    block_size, width = 16, 40
    row_tables = torch.arange(8 * width, dtype=torch.int32, device=DEVICE).view(8, width)
    row_lens = torch.tensor([0, 15, 16, 17, 600, 5, 6, 7], device=DEVICE)
    last_tokens = torch.arange(8, device=DEVICE) + 100
    rows = torch.tensor([4, -1, 0, 2, 1], device=DEVICE)
    ids, positions, slots, lens, tables = decode_inputs(
        rows, last_tokens, row_lens, row_tables, block_size
    )
    assert ids.tolist() == [104, 0, 100, 102, 101]
    assert positions.tolist() == [600, 0, 0, 16, 15]
    assert lens.tolist() == [601, 0, 1, 17, 16]
    slot = [
        int(row_tables[r, p // 16]) * 16 + p % 16 for r, p in [(4, 600), (0, 0), (2, 16), (1, 15)]
    ]
    assert slots.tolist() == [slot[0], -1, *slot[1:]]
    assert row_lens.tolist() == [1, 16, 17, 17, 601, 5, 6, 7]
    for i, row in enumerate(rows.tolist()):
        covered = -(-int(lens[i]) // block_size)
        assert torch.equal(tables[i, :covered], row_tables[row, :covered])


@pytest.mark.gpu
def test_pool_beyond_two_to_the_31_elements() -> None:
    """Slots past 2**31 / width must not wrap around: stored and read back by attention."""
    kv_heads, head_dim, block_size = 8, 128, 256
    num_blocks = 2**31 // (block_size * kv_heads * head_dim) + 9
    caches = torch.zeros(2, num_blocks, block_size, kv_heads, head_dim, device=DEVICE).bfloat16()
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
    assert_close(out, expected[-1:], torch.bfloat16)
    paged = prefill_attention(q, caches[0], caches[1], table, cu, cu, t, 0.1)
    assert_close(paged, expected, torch.bfloat16)
