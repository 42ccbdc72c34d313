"""Tests each Triton kernel except those of attention against its torch counterpart."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nanovllm.layers.activation import silu_and_mul as torch_silu_and_mul
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.sampler import Sampler, best_tokens
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.sampling_state import SamplingState
from tests.helpers.kernel_cases import DEVICE, DTYPES, HAS_GPU, assert_near, dtypes, randn
from tests.helpers.sampling import broken_logits, moved, sampling_state

pytest.importorskip("triton")
from nanovllm.kernels import dependent_launch
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_inputs import decode_inputs
from nanovllm.kernels.embedding import embed_share
from nanovllm.kernels.layernorm import add_rms_norm
from nanovllm.kernels.matmul import CANDIDATES, Candidate, TritonMatmul
from nanovllm.kernels.row_matmul import RowMatmul
from nanovllm.kernels.sampler import sample


@dtypes
@pytest.mark.parametrize("size", [64, 72, 1024])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, residual = randn(5, size, dtype=dtype), randn(5, size, dtype=dtype, seed=1)
    norm = RMSNorm(size, 1e-6).to(DEVICE, dtype)
    norm.weight.data = randn(size, dtype=dtype, seed=2)
    total = x + residual
    assert_near(add_rms_norm(x, None, norm.weight.data, 1e-6)[0], norm(x), dtype)
    out, new_residual = add_rms_norm(x, residual.clone(), norm.weight.data, 1e-6)
    assert_near(out, norm(total), dtype)
    assert torch.equal(new_residual, total)
    if dtype != torch.float32:
        # The parts add up to x exactly.
        parts = torch.stack((x.float() * 0.25, x.float() * 0.5, x.float() * 0.25))
        out_of_parts = add_rms_norm(parts, residual, norm.weight.data, 1e-6)
        assert torch.equal(out_of_parts[1], total)
        assert torch.equal(out_of_parts[0], out)
        # So do these, which are not rounded on the way.
        residual, half = x * 0, x * 0.5
        out_of_parts = add_rms_norm(torch.stack((half, x, -half)), residual, norm.weight.data, 1e-6)
        assert torch.equal(out_of_parts[1], x)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("matmul", {m: 0 for ms in CANDIDATES.values() for m in ms}, ids=str)
def test_matmuls(matmul: Candidate, dtype: torch.dtype) -> None:
    weight = randn(256, 1024, dtype=dtype)
    if not matmul.supports(weight):
        pytest.skip("for other GPUs")
    sizes = (1, 70) + (16, 200) * HAS_GPU
    if isinstance(matmul, RowMatmul):
        sizes = (1, matmul.most)
    for num_tokens in sizes:
        x = randn(num_tokens, 1024, dtype=dtype, seed=num_tokens)
        out, expected = matmul(x, weight), x.float() @ weight.float().T
        if matmul.split_k > 1:
            assert out.shape == (matmul.split_k, num_tokens, 256)
            assert out.dtype == torch.float32
            out = out.sum(0)
        if matmul.has_silu_epilogue:
            expected = torch_silu_and_mul(expected.cpu().to(dtype)).to(DEVICE)
        assert_near(out.to(dtype), expected, dtype)


def test_a_matmul_supports_what_its_tiles_divide() -> None:
    matmul = TritonMatmul(16, 64, 64, stages=3, warps=4, split_k=2)
    assert matmul.supports(torch.empty(192, 384, dtype=torch.float16))
    assert not matmul.supports(torch.empty(96, 384, dtype=torch.float16))
    assert not matmul.supports(torch.empty(192, 64 * 3, dtype=torch.float16))
    assert not replace(matmul, stages=99).supports(torch.empty(192, 384, dtype=torch.float16))


@pytest.mark.parametrize("size", [32, 416, 1536])
@pytest.mark.parametrize("split_k", [1, 2])
def test_matmuls_of_rows_take_any_number_of_input_features(split_k: int, size: int) -> None:
    """They hold a padded number of chunks of them, here up to a third more than there are."""
    dtype = torch.float16
    matmul = RowMatmul(most=4, warps=4, split_k=split_k)
    weight, x = randn(64, size, dtype=dtype), randn(3, size, dtype=dtype, seed=1)
    assert matmul.supports(weight)
    out = matmul(x, weight)
    out = out.sum(0) if split_k > 1 else out
    assert_near(out.to(dtype), x.float() @ weight.float().T, dtype)


def test_a_matmul_of_rows_supports_what_fits_into_its_registers() -> None:
    matmul = RowMatmul(most=4, warps=4, split_k=2)
    assert matmul.supports(torch.empty(64, 4096, dtype=torch.float16))
    assert not matmul.supports(torch.empty(60, 4096, dtype=torch.float16))
    assert not matmul.supports(torch.empty(64, 4096 - 16, dtype=torch.float16))
    assert not matmul.supports(torch.empty(64, 4096 + 32, dtype=torch.float16))
    gated = RowMatmul(most=4, warps=4, has_silu_epilogue=True)
    assert gated.supports(torch.empty(64, 1024, dtype=torch.float16))
    assert not gated.supports(torch.empty(64, 2048, dtype=torch.float16))


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((9, 0), None, True), ((12, 0), None, True), ((8, 9), None, False), ((9, 4), "7.0", False)],
)
def test_only_new_nvidia_gpus_start_kernels_early(
    capability: tuple[int, int],
    hip: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    has_dependent_launch = dependent_launch.has_dependent_launch.__wrapped__  # not cached
    assert has_dependent_launch(torch.device("cuda")) == expected
    assert not has_dependent_launch(torch.device("cpu"))


@dtypes
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_embed_share(rank: int, dtype: torch.dtype) -> None:
    """Three ranks hold shares of 34 of 100 ids, the last with two rows of padding. The hidden size
    exceeds a kernel's block."""
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
    assert_near(silu_and_mul(gate_up), expected, dtype)


@dtypes
@pytest.mark.parametrize("vocab", [500, 9001])
def test_sampler_draws_what_torch_draws(vocab: int, dtype: torch.dtype) -> None:
    n, num_rows = 12, 20
    logits = randn(n, vocab, dtype=dtype)
    logits[3, 100:200] = logits[3].max() + 1  # the lowest id of a tie wins
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))[:n]
    temperatures = torch.rand(num_rows, generator=torch.Generator().manual_seed(1)) * 2
    temperatures[rows[:6]] = 0
    seeds = torch.arange(num_rows) * 0x123456789ABCDEF - 2**62
    positions = torch.arange(num_rows) * 37
    params = {"temperatures": temperatures, "seeds": seeds, "context_lens": positions}
    state = sampling_state(**params, last_tokens=torch.full((num_rows,), -7))
    _, expected = best_tokens(logits.cpu(), rows, state)
    state = moved(state, DEVICE)
    last_tokens = state.last_tokens
    rows_on_device = rows.clone().to(DEVICE)
    rows_on_device[5] = -1
    ids = sample(logits, rows_on_device, state).cpu()
    valid = torch.arange(n) != 5
    assert torch.equal(ids[valid], expected[valid])
    assert expected[3] == 100
    assert torch.equal(last_tokens.cpu()[rows[valid]], expected[valid])
    untouched = torch.ones(num_rows, dtype=torch.bool)
    untouched[rows[valid]] = False
    assert (last_tokens.cpu()[untouched] == -7).all()


@pytest.mark.parametrize("vocab", [9, 509] + [9001] * HAS_GPU)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sampler_with_shares_of_the_vocabulary(num_ranks: int, vocab: int) -> None:
    """Several ranks sample the same ids as one, and never a padding id, not even if all logits are
    negative."""
    n, share = 8, -(-vocab // num_ranks)
    logits = randn(n, vocab, dtype=torch.float32) - 1000
    logits[1] = logits[2] = -2000  # all ranks tie
    logits[2, vocab // 2] = -0.0
    logits[2, 1] = 0.0
    rows = torch.arange(n, device=DEVICE)
    temperatures = torch.tensor([0, 0, 0, 0, 0.5, 1, 1.5, 2], device=DEVICE)
    seeds, positions = rows * 0x123456789ABCDEF, rows * 37
    params = {"temperatures": temperatures, "seeds": seeds, "context_lens": positions}
    state = moved(sampling_state(**params), torch.device("cpu"))
    _, expected = best_tokens(logits.cpu(), rows.cpu(), state)
    padded = torch.nn.functional.pad(logits, (0, num_ranks * share - vocab), value=float("-inf"))
    shares = [part.contiguous() for part in padded.split(share, dim=1)]

    def sample_on_each(gather: Callable[[torch.Tensor], torch.Tensor]) -> list[list[int]]:
        ids = []
        for rank, part in enumerate(shares):
            state = sampling_state(**params)
            sampled = sample(part, rows, state, first_id=rank * share, gather=gather)
            is_drawn = sampled >= 0  # not from the padding of a rank alone
            assert torch.equal(sampled[is_drawn], state.last_tokens[is_drawn])
            ids.append(sampled.tolist())
        return ids

    bests: list[torch.Tensor] = []
    sample_on_each(lambda best: [bests.append(best), best.unsqueeze(0)][1])
    assert sample_on_each(lambda _: torch.stack(bests)) == [expected.tolist()] * num_ranks
    assert expected[1] == 0
    assert expected[2] == 1


@dtypes
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_where_logits_are_no_numbers(temperature: float, dtype: torch.dtype) -> None:
    """The last tokens stay valid: the next step looks them up in the embedding."""
    logits, is_broken = broken_logits(5000, dtype)
    rows = torch.arange(len(logits), device=DEVICE)
    state = SamplingState.zeros(len(logits), DEVICE)
    state.temperatures.fill_(temperature)
    ids = sample(logits.to(DEVICE), rows, state).cpu()
    assert ((ids == -1) == is_broken).all()
    last = state.last_tokens.cpu()
    assert torch.equal(last[~is_broken], ids[~is_broken])
    assert ((last >= 0) & (last < 5000)).all()
    on_cpu = moved(state, torch.device("cpu"))
    assert torch.equal(Sampler(TPGroup(), 0)(logits, rows.cpu(), on_cpu), ids)
    assert ((on_cpu.last_tokens >= 0) & (on_cpu.last_tokens < 5000)).all()


def test_sampler_where_logits_of_one_rank_are_no_numbers() -> None:
    """All ranks find out, whichever has them."""
    n, share = 4, 300
    shares = [randn(n, share, dtype=torch.float32) for _ in range(2)]
    shares[0][1, 7] = float("nan")
    shares[1][2, 299] = float("inf")
    shares[1][3] = float("-inf")  # of one rank only: padding
    rows = torch.arange(n, device=DEVICE)
    bests: list[torch.Tensor] = []
    for gather in (
        lambda best: [bests.append(best), best.unsqueeze(0)][1],
        lambda _: torch.stack(bests),
    ):
        state = SamplingState.zeros(n, DEVICE)
        ids = [sample(x, rows, state, rank * share, gather) for rank, x in enumerate(shares)]
    for found in ids:
        assert [i < 0 for i in found.tolist()] == [False, True, True, False]


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
