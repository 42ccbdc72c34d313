"""Tests attention straight from the blocks of the cache, against torch and batch by batch."""

import pytest
import torch

pytest.importorskip("numba")

from nanovllm.kernels import cpu, cpu_multiplies
from nanovllm.layers.attention import LayerCache
from nanovllm.layers.attention_backends.numba import NumbaBackend
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.utils.context import Context
from tests.helpers.closeness import assert_close

pytestmark = pytest.mark.skipif(
    not cpu_multiplies(torch.float32), reason="another CPU, on which torch computes"
)

SCALE = 0.3
KV_DTYPES = pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def cached(
    lens: list[int], block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[LayerCache, torch.Tensor]:
    """Returns a cache with sequences of these lengths in shuffled blocks, NaN behind their last
    tokens, and their block tables, int32."""
    generator = torch.Generator().manual_seed(sum(lens))
    need = [-(-length // block_size) for length in lens]
    block_ids = torch.randperm(sum(need), generator=generator, dtype=torch.int32).split(need)
    tables = torch.full((len(lens), max(need) + 1), -(2**30), dtype=torch.int32)
    shape = 2, sum(need), block_size, kv_heads, head_dim
    pool = torch.randn(shape, generator=generator).to(dtype)
    for i, length in enumerate(lens):
        tables[i, : need[i]] = block_ids[i]
        if length % block_size:
            pool[:, block_ids[i][-1], length % block_size :] = float("nan")
    return LayerCache(*pool), tables


@KV_DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 2), (6, 2, 40), (9, 3, 64)], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_decode(block_size: int, shape: tuple[int, int, int], kv: torch.dtype) -> None:
    heads, kv_heads, head_dim = shape
    lens = [300, 0, 1, 17, 4]
    cache, tables = cached(lens, block_size, kv_heads, head_dim, kv)
    qkv = torch.randn(len(lens), heads + 2 * kv_heads, head_dim)
    q = qkv[:, :heads]
    context = Context(
        slot_mapping=torch.zeros(len(lens), dtype=torch.int64),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
        max_seqlen_k=300,
    )
    out = NumbaBackend().decode(q, cache, SCALE, context)
    in_fp32 = LayerCache(cache.k.float(), cache.v.float())
    expected = TorchBackend().decode(q.contiguous(), in_fp32, SCALE, context)
    assert_close(out, expected, num_eps=64)
    assert (out[1] == 0).all()
    for i, length in enumerate(lens):
        alone = cpu.attend(
            q[i : i + 1],
            *cache,
            SCALE,
            tables[i : i + 1].long(),
            torch.tensor([0]),
            torch.tensor([length]),
        )
        assert torch.equal(alone[0], out[i])


def test_scores_that_overflow_the_exponential_function() -> None:
    cache, tables = cached([3], 4, 1, 2, torch.float32)
    cache.k[tables[0, 0], :3] = torch.tensor([[[100.0, 0.0]], [[-100.0, 0.0]], [[50.0, 0.0]]])
    q = torch.tensor([[[10.0, 0.0]]])
    one, three = torch.tensor([0]), torch.tensor([3])
    out = cpu.attend(q, *cache, 1.0, tables.long(), one, three)
    assert_close(out[0, 0], cache.v[tables[0, 0], 0, 0], num_eps=128)


@KV_DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 2), (6, 2, 40), (9, 3, 64), (40, 1, 16)], ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("has_prefix", [False, True], ids=["no prefix", "prefixes"])
def test_prefill(
    has_prefix: bool, block_size: int, shape: tuple[int, int, int], kv: torch.dtype
) -> None:
    heads, kv_heads, head_dim = shape
    new = [1, 70, 16, 33]
    lens = [n + prefix for n, prefix in zip(new, [5, 90, 0, 1], strict=True)] if has_prefix else new
    cache, tables = cached(lens, block_size, kv_heads, head_dim, kv)
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    slots: list[int] = []
    for i, length in enumerate(lens):
        for position in range(length - new[i], length):
            slots.append(
                int(tables[i, position // block_size]) * block_size + position % block_size
            )
    context = Context(
        slot_mapping=torch.tensor(slots),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables if has_prefix else None,
        max_seqlen_k=max(lens),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
        max_seqlen_q=max(new),
    )
    qkv = torch.randn(sum(new), heads + 2 * kv_heads, head_dim)
    q = qkv[:, :heads]
    in_fp32 = LayerCache(cache.k.float(), cache.v.float())
    k, v = (pool.flatten(0, 1)[slots] for pool in in_fp32)
    expected = TorchBackend().prefill(q.contiguous(), k, v, in_fp32, SCALE, context)
    backend = NumbaBackend()
    out = backend.prefill(q, k, v, cache, SCALE, context)
    assert_close(out, expected, num_eps=64)
    next_layer = LayerCache(cache.k, -cache.v)
    assert torch.equal(backend.prefill(q, k, -v, next_layer, SCALE, context), -out)
