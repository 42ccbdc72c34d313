"""Tests that filtered draws follow the exact filtered distribution, on the CPU and from the Triton
kernels."""

from typing import Any

import pytest
import torch
from scipy import stats

from nanovllm import SamplingParams
from nanovllm.layers import filters as torch_filters
from nanovllm.utils.special_rows import FilterRows
from tests.helpers.kernel_cases import DEVICE, HAS_GPU
from tests.helpers.sampling import sampling_state

WANTS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"top_k": 6, "top_p": 0.7},
    {"min_p": 0.05, "top_k": 7},
    {"min_p": 0.05, "top_p": 0.9},
    {"min_p": 0.02, "top_k": 8, "top_p": 0.85, "temperature": 0.6},
    {"top_k": 300, "top_p": 0.5, "temperature": 1.5},
]
KINDS = ["random", "peaked", "tied", "flat"]


def logits_of(kind: str, vocab: int) -> torch.Tensor:
    noise = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "peaked":
        return noise.index_fill(0, torch.tensor([vocab // 2]), float(noise.max()) + 6)
    return {"random": noise, "tied": noise.round(), "flat": noise * 0}[kind]


def exact(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Computes the filtered distribution step by step, as its definition reads, in fp64."""
    p = (logits.double() / params.temperature).softmax(dim=0).tolist()
    ranked = sorted(range(len(p)), key=lambda i: (-float(logits[i]), i))
    kept = [i for i in ranked if p[i] >= params.min_p * p[ranked[0]] * (1 - 1e-12)]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, chosen = sum(p[i] for i in kept), 0.0, []
    for i in kept:
        chosen.append(i)
        mass += p[i] / total
        if mass >= params.top_p - 1e-12:
            break
    out = torch.zeros(len(p), dtype=torch.float64)
    out[chosen] = torch.tensor([p[i] for i in chosen], dtype=torch.float64)
    return out / out.sum()


def draws(
    implementation: Any, logits: torch.Tensor, params: SamplingParams, n: int
) -> torch.Tensor:
    """Draws `n` ids, at different positions of a few seeds."""
    index = torch.arange(n, device=DEVICE)
    state = sampling_state(
        temperatures=torch.full((n,), params.temperature, device=DEVICE),
        seeds=index // 64,
        context_lens=index % 64,
    )
    columns = FilterRows.columns([0] * n, range(n), [params] * n)
    filters = FilterRows(*(torch.from_numpy(column).to(DEVICE) for column in columns))
    drawn: torch.Tensor = implementation.draw_filtered(logits.to(DEVICE)[None], filters, state)
    return drawn.cpu()


def check(drawn: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that only ids of the distribution are drawn, as often as it says; ids that are
    expected less than five times count as one."""
    counts = torch.bincount(drawn, minlength=len(expected)).double()
    assert (counts[expected == 0] == 0).all()
    means = expected * len(drawn)
    is_rare = means < 5
    observed = torch.cat((counts[~is_rare], counts[is_rare].sum()[None]))
    means = torch.cat((means[~is_rare], means[is_rare].sum()[None]))
    observed, means = observed[means > 0], means[means > 0]
    if len(means) > 1:
        assert stats.chisquare(observed, means * (observed.sum() / means.sum())).pvalue > 1e-4


CASES = [(9, kind) for kind in KINDS] + [(503, "tied")]  # a draw in torch takes a millisecond


@pytest.mark.parametrize("want", WANTS, ids=str)
@pytest.mark.parametrize(("vocab", "kind"), CASES)
def test_draws_follow_the_filtered_distribution(
    vocab: int, kind: str, want: dict[str, Any]
) -> None:
    logits, params = logits_of(kind, vocab), SamplingParams(**want)
    check(draws(torch_filters, logits, params, 600), exact(logits, params))


@pytest.mark.parametrize("want", WANTS if HAS_GPU else WANTS[6:7], ids=str)
@pytest.mark.parametrize("kind", KINDS if HAS_GPU else ["tied"])
@pytest.mark.parametrize("vocab", [9, 503] if HAS_GPU else [9])
def test_kernels_draw_from_the_filtered_distribution(
    vocab: int, kind: str, want: dict[str, Any]
) -> None:
    from nanovllm.kernels import filters as triton_filters

    logits, params = logits_of(kind, vocab).half(), SamplingParams(**want)
    n = 20000 if HAS_GPU else 40  # the interpreter takes half a second for each
    check(draws(triton_filters, logits, params, n), exact(logits, params))


@pytest.mark.gpu
@pytest.mark.parametrize("want", WANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_draw_from_a_real_vocabulary(kind: str, want: dict[str, Any]) -> None:
    from nanovllm.kernels import filters as triton_filters

    logits, params = logits_of(kind, 151936) * 3, SamplingParams(**want)
    check(draws(triton_filters, logits, params, 20000), exact(logits, params))


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9])
def test_top_p_that_the_first_id_reaches_keeps_it_alone(top_p: float) -> None:
    logits = torch.tensor([0.0, 5.0, 5.0 - 1e-3, 9.0])
    kept = torch_filters.kept_ids(logits, 1.0, 0, top_p, -float("inf"))
    assert kept.tolist() == [3]


@pytest.mark.parametrize(("top_p", "num"), [(0.3, 3), (0.5, 5), (0.7, 7), (0.71, 8), (1.0, 10)])
def test_top_p_among_equals_keeps_the_lower_ids(top_p: float, num: int) -> None:
    kept = torch_filters.kept_ids(torch.zeros(10), 1.0, 0, top_p, -float("inf"))
    assert kept.tolist() == list(range(num))


def test_filters_work_on_what_the_one_before_left() -> None:
    """Without renormalising after top_k, top_p would keep both ids."""
    logits = torch.tensor([0.5, 0.26, 0.24]).log()
    assert torch_filters.kept_ids(logits, 1.0, 2, 0.6, -float("inf")).tolist() == [0]
    assert torch_filters.kept_ids(logits, 1.0, 0, 0.6, -float("inf")).tolist() == [0, 1]
    assert torch_filters.kept_ids(logits, 1.0, 0, 0.6, torch.tensor(0.5).log()).tolist() == [0]
