"""Tests products with packed weights against torch, and that they do not depend on the batch."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("numba")

from nanovllm.kernels import cpu, cpu_multiplies
from nanovllm.kernels.cpu.matmul import PANELS_PER_CHUNK, TOKENS_PER_CHUNK, WIDTH
from tests.helpers.closeness import assert_close

pytestmark = pytest.mark.skipif(
    not cpu_multiplies(torch.float32), reason="another CPU, on which torch computes"
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = [(1, 1), (WIDTH, 5), (40, 33), (PANELS_PER_CHUNK * WIDTH, 64), (200, 100)]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(previous)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@DTYPES
def test_it_equals_torch_and_no_row_depends_on_others(
    dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
) -> None:
    n, size = shape
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(n, size, generator=generator).to(dtype)
    bias = cpu.padded(torch.randn(n, generator=generator).to(dtype)) if has_bias else None
    packed = cpu.pack(weight)
    assert torch.equal(cpu.unpack(packed, n), weight)
    x = torch.randn(2 * TOKENS_PER_CHUNK + 5, size, generator=generator)
    whole = cpu.linear(x, packed, n, bias)
    expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(whole, expected, num_eps=32)
    for num_rows in (*range(14), TOKENS_PER_CHUNK, TOKENS_PER_CHUNK + 1):
        assert torch.equal(cpu.linear(x[:num_rows], packed, n, bias), whole[:num_rows])


@DTYPES
def test_special_values_reach_the_results_that_they_belong_to(dtype: torch.dtype) -> None:
    n, size, num_rows = 3 * WIDTH + 1, 20, 7
    x, weight = torch.ones(num_rows, size), torch.ones(n, size, dtype=dtype)
    weight[5, 3], weight[-1, 0] = float("inf"), float("nan")
    x[2, 4], x[3, 3] = float("nan"), float("-inf")
    out = cpu.linear(x, cpu.pack(weight), n, None)
    torch.testing.assert_close(out, linear(x, weight.float()), equal_nan=True)


def test_half_precision_of_any_bits_is_widened_exactly() -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        weight = bits.view(dtype)[:, None]
        out = cpu.linear(torch.ones(1, 1), cpu.pack(weight), len(weight), None)
        torch.testing.assert_close(out[0], weight[:, 0].float(), rtol=0, atol=0, equal_nan=True)
