"""Tests the Triton kernels of a mixture of experts against torch."""

import pytest
import torch

from nanovllm.layers.moe import Experts, Router
from nanovllm.utils.distributed import TPGroup
from tests.helpers.closeness import assert_close
from tests.helpers.kernel_cases import DEVICE, HAS_GPU, assert_near, dtypes, randn

pytest.importorskip("triton")
from nanovllm.kernels import experts as expert_kernels
from nanovllm.kernels import moe_routing
from nanovllm.kernels.expert_tiles import HALF_PRECISION, SINGLE_PRECISION, Tile
from nanovllm.kernels.experts import launches, run_experts
from nanovllm.kernels.grouped_matmul import down, gate_up
from nanovllm.kernels.moe_routing import choose_experts, sort_by_expert

CPU = torch.device("cpu")
# (tokens, experts, top_k, size, intermediate size)
SHAPES = [(7, 5, 2, 40, 24), (1, 5, 2, 64, 32), (20, 4, 4, 72, 96), (40, 16, 3, 64, 32)]
GPU_SHAPES = [(300, 128, 8, 512, 192), (1, 128, 8, 512, 192), (500, 5, 2, 320, 80)]
shapes = pytest.mark.parametrize("shape", SHAPES + GPU_SHAPES * HAS_GPU, ids=str)


@dtypes
@shapes
@pytest.mark.parametrize("normalise", [True, False])
def test_choose_experts(
    normalise: bool, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    num_tokens, num_experts, top_k, size, _ = shape
    x, weight = randn(num_tokens, size, dtype=dtype), randn(num_experts, size, dtype=dtype, seed=1)
    weight *= size**-0.5
    experts, weights = choose_experts(x, weight, top_k, normalise=normalise)
    probs = (x.double() @ weight.double().T).softmax(-1)
    expected, expected_experts = probs.topk(top_k)
    if normalise:
        expected /= expected.sum(-1, keepdim=True)
    # Only a tie of fp32 may go another way; none of these probabilities is that close.
    assert torch.equal(experts, expected_experts.int())
    assert_close(weights, expected, num_eps=64)


def test_a_tie_goes_to_the_lowest_expert_and_nan_to_a_valid_one() -> None:
    x = torch.ones(3, 32, device=DEVICE)
    x[2] = float("nan")
    weight = torch.zeros(6, 32, device=DEVICE)
    weight[4] = 0.1
    experts, weights = choose_experts(x, weight, 3, normalise=False)
    assert experts.tolist()[:2] == [[4, 0, 1]] * 2
    assert len(set(experts.tolist()[2])) == 3
    assert all(0 <= expert < 6 for expert in experts.tolist()[2])
    assert_close(weights[:2].sum(1) + 3 * weights[:2, 1], torch.ones(2), num_eps=8)


def test_choose_experts_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have other sizes then, but results are the same."""
    x, weight = (randn(n, 200, dtype=torch.float16, seed=n) for n in (70, 5))
    expected_experts, expected = choose_experts(x, weight, 2, normalise=True)
    monkeypatch.setattr(moe_routing, "FEW_TOKENS", 69)
    experts, weights = choose_experts(x, weight, 2, normalise=True)
    assert torch.equal(experts, expected_experts)
    assert_close(weights, expected, num_eps=256)


def test_the_router_chooses_as_in_torch() -> None:
    router = Router(48, 9, 3, normalise=True)
    router.weight.data = randn(9, 48, dtype=torch.float32).cpu()
    x = randn(20, 48, dtype=torch.float32, seed=1)
    experts, weights = choose_experts(x, router.weight.data.to(DEVICE), 3, normalise=True)
    expected_experts, expected = router.choose(x.cpu())
    assert torch.equal(experts.cpu(), expected_experts.int())
    assert_close(weights, expected, num_eps=64)


def assignments(kind: str, num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Returns experts of the tokens, int32 [num_tokens, top_k], of a token all different."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "one expert gets all":
        scores[:, 1] = 2
    if kind == "experts without tokens":
        scores[:, :: max(num_experts // top_k, 1)] = -1
        scores[:, -1] = -1
    return scores.topk(top_k).indices.int().to(DEVICE)


KINDS = ["even", "one expert gets all", "experts without tokens"]


@pytest.mark.parametrize("tile_size", [16, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 5, 2), (9, 40, 8), (70, 5, 2), (600, 9, 8), (50, 3, 1)], ids=str
)
def test_sort_by_expert(shape: tuple[int, int, int], kind: str, tile_size: int) -> None:
    experts = assignments(kind, *shape)
    routing = sort_by_expert(experts, experts.float(), shape[1], tile_size)
    assert routing.order.tolist() == experts.view(-1).sort(stable=True).indices.tolist()
    sorted_experts = experts.view(-1)[routing.order.long()].tolist()
    covered = []
    for expert, first, end in routing.tiles.tolist():
        if expert >= 0:
            assert 0 < end - first <= tile_size
            assert set(sorted_experts[first:end]) == {expert}
            covered += range(first, end)
    assert covered == list(range(experts.numel()))


def weights_of(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> Experts:
    """Makes the experts on the CPU, with weights that keep the hidden states' size."""
    _, num_experts, _, size, inner = shape
    layer = Experts(TPGroup(), num_experts, size, inner)
    gate_up_weight = randn(num_experts, 2 * inner, size, dtype=torch.float32, seed=2)
    layer.gate_up_proj.data = (gate_up_weight * size**-0.5).to(CPU, dtype)
    down_weight = randn(num_experts, size, inner, dtype=torch.float32, seed=3) * inner**-0.5
    layer.down_proj.data = down_weight.to(CPU, dtype)
    return layer


@dtypes
@shapes
@pytest.mark.parametrize("kind", KINDS)
def test_run_experts(kind: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_experts, top_k, size, _ = shape
    experts = assignments(kind, num_tokens, num_experts, top_k)
    x, weights = randn(num_tokens, size, dtype=dtype), experts.float() / num_experts + 0.1
    layer = weights_of(shape, dtype)
    expected = layer.float()(x.cpu().float(), experts.cpu(), weights.cpu())
    on_device = weights_of(shape, dtype).to(DEVICE)
    out = run_experts(x, experts, weights, on_device.gate_up_proj.data, on_device.down_proj.data)
    assert out.shape == (top_k, num_tokens, size)
    assert_near(out.float().sum(0), expected.to(DEVICE), dtype)


def test_no_tokens() -> None:
    """As in a step of prompts none of which ends: the last layer's MLP has nothing to compute."""
    layer = weights_of((0, 5, 2, 40, 24), torch.float16).to(DEVICE)
    x, router_weight = randn(0, 40, dtype=torch.float16), randn(5, 40, dtype=torch.float16)
    chosen = choose_experts(x, router_weight, 2, normalise=True)
    out = run_experts(x, *chosen, layer.gate_up_proj.data, layer.down_proj.data)
    assert out.shape == (2, 0, 40)


@pytest.mark.parametrize("index", range(len(HALF_PRECISION)))
def test_every_tile_of_half_precision(index: int) -> None:
    """The tiles divide the sizes in one case; in the last the copy engine cannot read the rows."""
    tiles, dtype = HALF_PRECISION[index], torch.float16
    for size, inner in ((256, 128), (136, 72), (132, 44)):
        shape = (90, 3, 2, size, inner)
        experts = assignments("one expert gets all", *shape[:3])
        weights = torch.ones_like(experts, dtype=torch.float32)
        layer, x = weights_of(shape, dtype).to(DEVICE), randn(90, size, dtype=dtype)
        routing = sort_by_expert(experts, weights, 3, tiles.gate_up.block_m)
        hidden = gate_up(x, layer.gate_up_proj.data, routing, tiles.gate_up)
        out = down(hidden, layer.down_proj.data, routing, tiles.down)
        expected = layer.cpu().float()(x.cpu().float(), experts.cpu(), weights.cpu())
        assert_near(out.float().sum(0), expected.to(DEVICE), dtype)


def test_tables_have_one_routing_for_both_matmuls_and_end_with_any_number_of_tokens() -> None:
    for table in (HALF_PRECISION, SINGLE_PRECISION):
        assert [tiles.most for tiles in table] == sorted(tiles.most for tiles in table)
        assert table[-1].most == float("inf")
        assert all(tiles.gate_up.block_m == tiles.down.block_m for tiles in table)


def test_a_tile_takes_as_many_stages_as_fit() -> None:
    tile = Tile(128, 128, 64, stages=9, warps=8)
    x = torch.empty(1, dtype=torch.float16)  # of 227 KiB, a stage takes 48 or 32
    assert tile.stages_that_fit(x, 2) == 4
    assert tile.stages_that_fit(x, 1) == 7
    assert Tile(16, 16, 16, stages=3, warps=4).stages_that_fit(x, 2) == 3
    assert Tile(512, 512, 256, stages=3, warps=4).stages_that_fit(x, 2) == 1


def test_launches_need_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use tiles without tokens, so on NaN weights nothing is computed but the routing."""
    layer = weights_of((1, 5, 2, 64, 32), torch.float16).to(DEVICE)
    layer.gate_up_proj.data.fill_(float("nan"))
    router_weight = randn(5, 64, dtype=torch.float16)
    gate_up_weight, down_weight = layer.gate_up_proj.data, layer.down_proj.data
    monkeypatch.setattr(expert_kernels, "FEW_TOKENS", 9)
    calls = launches(router_weight, gate_up_weight, down_weight, 2, normalise=True)
    assert len(calls) == 3 + 2 * len(HALF_PRECISION)
    for call in calls:
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 100, 200, 400, 1500])
def test_a_tokens_result_does_not_depend_on_the_other_tokens(num_tokens: int) -> None:
    """Its place in the batch and in a tile changes, to the bit nothing else."""
    shape, dtype = (num_tokens, 128, 8, 512, 256), torch.bfloat16
    layer, x = weights_of(shape, dtype).to(DEVICE), randn(num_tokens, 512, dtype=dtype)
    router_weight = randn(128, 512, dtype=dtype, seed=1) * 0.04

    def run(x: torch.Tensor) -> torch.Tensor:
        chosen = choose_experts(x, router_weight, 8, normalise=True)
        return run_experts(x, *chosen, layer.gate_up_proj.data, layer.down_proj.data)

    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = run(x)
    assert torch.equal(run(x[order]), out[:, order])
    assert torch.equal(run(x), out)


@pytest.mark.gpu
def test_a_graph_follows_the_routing_of_its_inputs() -> None:
    shape, dtype = (24, 16, 4, 256, 128), torch.bfloat16
    layer = weights_of(shape, dtype).to(DEVICE)
    router_weight = randn(16, 256, dtype=dtype, seed=1)
    x = torch.zeros(24, 256, dtype=dtype, device=DEVICE)

    def run() -> torch.Tensor:
        chosen = choose_experts(x, router_weight, 4, normalise=False)
        return run_experts(x, *chosen, layer.gate_up_proj.data, layer.down_proj.data)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        x.copy_(randn(24, 256, dtype=dtype, seed=seed))
        graph.replay()
        assert torch.equal(captured, run())
