"""Tests that the sampler draws from softmax(logits / T), with noise that depends on the request
alone."""

from pathlib import Path

import pytest
import torch
from scipy import stats

from nanovllm import LLM, SamplingParams
from nanovllm.layers.sampler import best_tokens, gumbel_noise
from tests.helpers.engines import make_llm, sampled_ids
from tests.helpers.sampling import sampling_state

NUM_DRAWS = 65536


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    state = sampling_state(temperatures=temperatures, seeds=seeds, context_lens=positions)
    return best_tokens(logits, torch.arange(len(seeds)), state)[1]


def draw(logits: torch.Tensor, temperature: float, seeds: torch.Tensor) -> torch.Tensor:
    n = len(seeds)
    temperatures = torch.full((n,), temperature)
    return sample(logits.expand(n, -1), temperatures, seeds, torch.arange(n) % 4096)


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    return float(stats.chisquare(counts.double(), probabilities.double() * counts.sum()).pvalue)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [7, 300])
def test_draws_follow_softmax(temperature: float, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    seeds = torch.arange(NUM_DRAWS) // 4096  # 16 seeds, 4096 positions each
    counts = torch.bincount(draw(logits, temperature, seeds), minlength=vocab)
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    assert chi_square_p(counts, probabilities / probabilities.sum()) > 1e-3


@pytest.mark.parametrize("what", ["seeds", "high seeds", "positions"])
def test_consecutive_keys_are_independent(what: str) -> None:
    """The ids of neighbouring seeds or positions are uncorrelated, by a chi-square test of
    pairs."""
    n, vocab = 40000, 8
    index = torch.arange(n)
    zero = torch.zeros(n, dtype=torch.int64)
    seeds, positions = {
        "seeds": (index, zero),
        "high seeds": (index << 32, zero),
        "positions": (zero, index),
    }[what]
    ids = sample(torch.zeros(n, vocab), torch.ones(n), seeds, positions)
    pairs = torch.bincount(ids[:-1] * vocab + ids[1:], minlength=vocab * vocab)
    assert chi_square_p(pairs, torch.full((vocab * vocab,), 1 / vocab**2)) > 1e-3


def test_noise_is_standard_gumbel_in_bulk_and_tail() -> None:
    noise = gumbel_noise(torch.arange(40), torch.arange(40) * 7, torch.arange(20000)).flatten()
    assert noise.isfinite().all()
    assert stats.kstest(noise[::8].double(), "gumbel_r").pvalue > 1e-3
    expected = len(noise) * -torch.expm1(-torch.exp(torch.tensor(-10.0)))
    assert abs((noise > 10).sum() - expected) < 5 * expected.sqrt()


def test_noise_is_precise_where_it_is_large() -> None:
    """Large noise values decide the sample in a large vocabulary, so the largest values must stay
    distinct."""
    noise = gumbel_noise(torch.arange(64), torch.zeros(64, dtype=torch.int64), torch.arange(50000))
    top = noise.flatten().topk(1000).values
    assert len(top.unique()) > 990
    assert top[0] > 13


def test_greedy_is_exact_and_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 3.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    zeros = torch.zeros(3)
    ids = sample(logits, zeros, torch.arange(3), torch.arange(3))
    assert ids.tolist() == [1, 0, 0]


def test_rows_do_not_influence_each_other_and_logits_stay_untouched() -> None:
    logits = torch.randn(6, 50)
    temperatures = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0, 1.0])
    seeds, positions = torch.arange(6), torch.arange(6) + 9
    before = logits.clone()
    together = sample(logits, temperatures, seeds, positions)
    assert torch.equal(logits, before)
    for i in range(6):
        row = slice(i, i + 1)
        assert sample(logits[row], temperatures[row], seeds[row], positions[row]) == together[i]


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> LLM:
    return make_llm(tiny_qwen3, device="auto")


PARAMS = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=7)


def test_seeded_request_ignores_neighbours_preemption_and_chunks(
    llm: LLM, tiny_qwen3: Path, ragged_prompts: list[list[int]]
) -> None:
    alone = [sampled_ids(llm, [prompt], PARAMS)[0] for prompt in ragged_prompts]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    assert sampled_ids(llm, ragged_prompts, PARAMS) == alone
    tiny_pool = {"num_kvcache_blocks": 9, "max_num_batched_tokens": 13}
    tight = make_llm(tiny_qwen3, device="auto", **tiny_pool)
    assert sampled_ids(tight, ragged_prompts, PARAMS) == alone
    assert tight.scheduler.num_preemptions > 0


def test_identical_prompts_differ_and_a_fresh_engine_repeats(tiny_qwen3: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    prompts = [[5, 6, 7]] * 4
    config = {"device": "auto", "max_num_seqs": 4}
    runs = [sampled_ids(make_llm(tiny_qwen3, **config), prompts, params) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 4
    other = sampled_ids(make_llm(tiny_qwen3, seed=1, **config), prompts, params)
    assert not {tuple(ids) for ids in other} & {tuple(ids) for ids in runs[0]}


def test_own_seed_repeats_and_differs_by_seed(llm: LLM) -> None:
    first, again = sampled_ids(llm, [[9, 8, 7]] * 2, PARAMS)
    assert first == again
    for seed in (8, 2**64 - 1, 2**63):
        params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=seed)
        assert sampled_ids(llm, [[9, 8, 7]], params) != [first]


def test_greedy_and_sampled_requests_mix(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = [3, 1, 4, 1, 5]
    mixed = llm.generate([prompt] * 3, [greedy, PARAMS, greedy], use_tqdm=False)
    assert mixed[0]["token_ids"] == mixed[2]["token_ids"] == sampled_ids(llm, [prompt], greedy)[0]
    assert mixed[1]["token_ids"] == sampled_ids(llm, [prompt], PARAMS)[0]
