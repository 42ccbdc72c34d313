"""The matmuls of a mixture of experts: each expert's weight times the tokens that go to it.

A program computes one tile: some tokens of one expert, and some output features. In a decode step
an expert has few tokens, and reading the weights, each once, is all that takes time. In a large
prefill an expert has a thousand tokens, and the arithmetic is the limit. Either tokens or weights
lie along the wide side of the tensor cores, which takes 64 at a time.

The result of a token does not depend on its place in a tile, nor on the tokens beside it.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import silu_and_mul_tile
from nanovllm.kernels.expert_tiles import Tile
from nanovllm.kernels.moe_routing import Routing


@triton.jit
def _multiply_add(x, weight, acc, WEIGHT_IS_WIDE: tl.constexpr):
    """Adds x [BLOCK_M, BLOCK_K] times weight [BLOCK_N, BLOCK_K] to acc [BLOCK_M, BLOCK_N], which is
    transposed if WEIGHT_IS_WIDE."""
    if WEIGHT_IS_WIDE:  # one return: Triton wants all returns to have one type
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def _load_weight(ptrs, in_n, in_k, DIVIDES: tl.constexpr):
    if DIVIDES:
        weight = tl.load(ptrs)
    else:
        weight = tl.load(ptrs, mask=in_n[:, None] & in_k[None, :], other=0.0)
    return weight


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [num_tokens, K]
    weight,  # [num_experts, 2 * N, K]: gates, then ups; a pointer or a descriptor of its rows
    out_ptr,  # [num_assignments, N], in the order of `order_ptr`
    order_ptr,
    tiles_ptr,
    N,
    K,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_IS_WIDE: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    DIVIDES: tl.constexpr,  # whether the blocks divide N and K
):
    num_blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    tile_ptr = tiles_ptr + tl.program_id(0) // num_blocks * 3
    expert = tl.load(tile_ptr)
    if expert < 0:
        return
    place = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    in_m = place < tl.load(tile_ptr + 2)
    token = tl.load(order_ptr + place, mask=in_m, other=0) // TOP_K
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * K + k[None, :]
    row = expert * 2 * N + block * BLOCK_N
    if not HAS_DESCRIPTOR:
        gate_ptrs = weight + expert.to(tl.int64) * 2 * N * K + n[:, None] * K + k[None, :]
    if WEIGHT_IS_WIDE:
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = gate
    for first in range(0, K, BLOCK_K):
        if DIVIDES:
            x = tl.load(x_ptrs, mask=in_m[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=in_m[:, None] & (first + k < K)[None, :], other=0.0)
        if HAS_DESCRIPTOR:  # rows beyond the expert's meet no output, columns beyond K are zeros
            gate_weight = weight.load([row, first])
            up_weight = weight.load([row + N, first])
        else:
            gate_weight = _load_weight(gate_ptrs, n < N, first + k < K, DIVIDES)
            up_weight = _load_weight(gate_ptrs + N * K, n < N, first + k < K, DIVIDES)
            gate_ptrs += BLOCK_K
        gate = _multiply_add(x, gate_weight, gate, WEIGHT_IS_WIDE)
        up = _multiply_add(x, up_weight, up, WEIGHT_IS_WIDE)
        x_ptrs += BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = silu_and_mul_tile(gate.to(dtype), up.to(dtype))
    if WEIGHT_IS_WIDE:
        out = tl.trans(out)
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, out, mask=in_m[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    x_ptr,  # [num_assignments, K], in the order of `order_ptr`
    weight,  # [num_experts, N, K]; a pointer or a descriptor of its rows
    out_ptr,  # [TOP_K, num_tokens, N]
    order_ptr,
    tiles_ptr,
    router_weights_ptr,  # [num_tokens, TOP_K]
    num_tokens,
    N,
    K,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_IS_WIDE: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    num_blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    tile_ptr = tiles_ptr + tl.program_id(0) // num_blocks * 3
    expert = tl.load(tile_ptr)
    if expert < 0:
        return
    place = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    in_m = place < tl.load(tile_ptr + 2)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + place.to(tl.int64)[:, None] * K + k[None, :]
    row = expert * N + block * BLOCK_N
    if not HAS_DESCRIPTOR:
        weight_ptrs = weight + expert.to(tl.int64) * N * K + n[:, None] * K + k[None, :]
    if WEIGHT_IS_WIDE:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        if DIVIDES:
            x = tl.load(x_ptrs, mask=in_m[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=in_m[:, None] & (first + k < K)[None, :], other=0.0)
        if HAS_DESCRIPTOR:
            weight_tile = weight.load([row, first])
        else:
            weight_tile = _load_weight(weight_ptrs, n < N, first + k < K, DIVIDES)
            weight_ptrs += BLOCK_K
        acc = _multiply_add(x, weight_tile, acc, WEIGHT_IS_WIDE)
        x_ptrs += BLOCK_K
    if WEIGHT_IS_WIDE:
        acc = tl.trans(acc)
    assignment = tl.load(order_ptr + place, mask=in_m, other=0)
    acc *= tl.load(router_weights_ptr + assignment, mask=in_m, other=0.0)[:, None]
    summand = (assignment % TOP_K).to(tl.int64) * num_tokens + assignment // TOP_K
    out_ptrs = out_ptr + summand[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & (n < N)[None, :])


def gate_up(x: torch.Tensor, weight: torch.Tensor, routing: Routing, tile: Tile) -> torch.Tensor:
    """Computes SiLU(gate) * up of each assignment, in the order of `routing`.

    x [t, size], weight [num_experts, 2 * n, size] -> [t * top_k, n]
    """
    size, n = weight.shape[2], weight.shape[1] // 2
    out = x.new_empty(len(routing.order), n)
    argument = tile.weight_argument(weight)
    _gate_up_kernel[tile.grid(n, len(routing.tiles))](
        x,
        argument,
        out,
        routing.order,
        routing.tiles,
        n,
        size,
        TOP_K=routing.top_k,
        **tile.meta(x, argument, n, 2),
    )
    return out


def down(x: torch.Tensor, weight: torch.Tensor, routing: Routing, tile: Tile) -> torch.Tensor:
    """Computes x W^T of each assignment times its weight, as summands of the tokens' results.

    x [t * top_k, size] in the order of `routing`, weight [num_experts, n, size] -> [top_k, t, n]
    """
    num_tokens = len(routing.weights)
    _, n, size = weight.shape
    out = x.new_empty(routing.top_k, num_tokens, n)
    argument = tile.weight_argument(weight)
    _down_kernel[tile.grid(n, len(routing.tiles))](
        x,
        argument,
        out,
        routing.order,
        routing.tiles,
        routing.weights,
        num_tokens,
        n,
        size,
        TOP_K=routing.top_k,
        **tile.meta(x, argument, n, 1),
    )
    return out
