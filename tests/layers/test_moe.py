"""Tests the mixture of experts on the CPU against its definition, and its shares of ranks."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.moe import Experts, MixtureOfExperts, Router
from nanovllm.utils.distributed import TPGroup
from tests.helpers.closeness import assert_close

NUM_EXPERTS, TOP_K, SIZE, INNER = 6, 3, 24, 40


def make(group: TPGroup | None = None, *, normalise: bool = True) -> MixtureOfExperts:
    """Makes a mixture whose experts, and the shares of ranks, come from the same random weights."""
    group = group or TPGroup()
    mixture = MixtureOfExperts(
        group,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=SIZE,
        intermediate_size=INNER,
        normalise=normalise,
    )
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2, INNER, SIZE, generator=generator) * 0.3
    down = torch.randn(NUM_EXPERTS, SIZE, INNER, generator=generator) * 0.3
    mixture.gate.weight.data = torch.randn(NUM_EXPERTS, SIZE, generator=generator)
    own = slice(group.rank * INNER // group.size, (group.rank + 1) * INNER // group.size)
    mixture.experts.gate_up_proj.data = gate_up[:, :, own].flatten(1, 2)
    mixture.experts.down_proj.data = down[:, :, own]
    return mixture


def hidden_states(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, SIZE, generator=torch.Generator().manual_seed(1))


def by_definition(mixture: MixtureOfExperts, hidden: torch.Tensor) -> torch.Tensor:
    """Computes all experts for each token in fp64, and adds up the chosen ones."""
    mixture, hidden = mixture.double(), hidden.double()
    out = torch.zeros_like(hidden)
    for token, x in enumerate(hidden):
        probs = (mixture.gate.weight @ x).softmax(0)
        chosen = probs.argsort(descending=True)[:TOP_K]
        total = probs[chosen].sum() if mixture.gate.normalise else 1
        for expert in chosen:
            gate, up = (mixture.experts.gate_up_proj[expert] @ x).chunk(2)
            result = mixture.experts.down_proj[expert] @ (F.silu(gate) * up)
            out[token] += probs[expert] / total * result
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 30])
@pytest.mark.parametrize("normalise", [True, False])
def test_equals_its_definition(normalise: bool, num_tokens: int) -> None:
    mixture, hidden = make(normalise=normalise), hidden_states(num_tokens)
    out = mixture(hidden)
    assert_close(out, by_definition(mixture, hidden), num_eps=64)


@pytest.mark.parametrize("size", [2, 4])
def test_summands_of_the_ranks_add_up(size: int) -> None:
    hidden = hidden_states(20)
    parts = [make(TPGroup(rank, size))(hidden) for rank in range(size)]
    assert_close(torch.stack(parts).sum(0), make()(hidden), num_eps=64)


def test_a_norm_without_peer_memory_adds_up_summands_before_it_sums_over_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on GPUs without direct links; the other rank has zeros."""
    shapes = []

    def all_reduce(_: TPGroup, x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return x

    monkeypatch.setattr(TPGroup, "all_reduce", all_reduce)
    norm = RMSNorm(SIZE, 1e-6, TPGroup(0, 2))
    norm.weight.data.fill_(2)
    parts, residual = torch.stack([hidden_states(5), hidden_states(5) / 3]), hidden_states(5)
    out, total = norm.add_forward(parts, residual.clone())
    assert shapes == [(5, SIZE)]
    assert_close(total, hidden_states(5) * (1 + 4 / 3), num_eps=4)
    assert_close(out, norm(total), num_eps=4)


def test_all_tokens_to_one_expert() -> None:
    mixture, hidden = make(), hidden_states(9).abs()
    mixture.gate.weight.data[:] = -1 - torch.arange(NUM_EXPERTS).unsqueeze(1)
    experts, _ = mixture.gate.choose(hidden)
    assert experts.tolist() == [[0, 1, 2]] * 9
    assert_close(mixture(hidden), by_definition(mixture, hidden), num_eps=64)


def test_half_precision_weights_are_softmaxed_in_fp32() -> None:
    router = Router(SIZE, NUM_EXPERTS, TOP_K, normalise=False).bfloat16()
    router.weight.data.fill_(0)
    _, weights = router.choose(hidden_states(2).bfloat16())
    assert weights.dtype == torch.float32
    assert weights.flatten().tolist() == pytest.approx([1 / NUM_EXPERTS] * 2 * TOP_K, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_activations_meet_experts_of_half_precision(dtype: torch.dtype) -> None:
    """A CPU that packs weights of half precision computes in fp32 between its layers."""
    mixture, hidden = make(), hidden_states(9)
    mixture.experts.to(dtype)
    out = mixture(hidden)
    assert out.dtype == torch.float32
    assert_close(out, by_definition(mixture, hidden), num_eps=64)


def test_impossible_sizes_are_refused() -> None:
    for top_k in (0, NUM_EXPERTS + 1):
        with pytest.raises(ValueError, match=f"num_experts_per_tok={top_k} must lie between"):
            Router(SIZE, NUM_EXPERTS, top_k, normalise=True)
    with pytest.raises(ValueError, match="moe_intermediate_size=40 does not divide by"):
        Experts(TPGroup(1, 3), NUM_EXPERTS, SIZE, INNER)
