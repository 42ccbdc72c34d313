"""Which experts each token of a mixture of experts goes to, and the order of the work by expert.

Everything stays on the device, and the number of tokens alone determines every grid, so that a CUDA
graph can capture it. There are no atomics: a batch gives one order, and a token's experts and their
weights do not depend on the other tokens, only on whether there are many.

An assignment is one of the `top_k` experts of a token; assignment i * top_k + j is the j-th best
expert of token i.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FEW_TOKENS = 2048  # up to as many, programs are too few for the GPU unless the sums are split
TOKENS_OF_TOP_K = 4
SORT_BLOCK = 2048  # assignments that a program reads at a time


@triton.jit(do_not_specialize=["num_tokens"])
def _router_logits_kernel(
    x_ptr,  # [num_tokens, size]
    weight_ptr,  # [num_experts, size]
    logits_ptr,  # fp32 [splits, num_tokens, PADDED_EXPERTS]
    num_tokens,
    num_experts,
    size,
    size_per_split,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    expert = tl.arange(0, PADDED_EXPERTS)
    split = tl.program_id(1)
    start = split * size_per_split
    end = min(start + size_per_split, size)
    acc = tl.zeros([BLOCK_T, PADDED_EXPERTS], tl.float32)
    for first in range(start, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        in_k = k[None, :] < end
        x = tl.load(
            x_ptr + token[:, None] * size + k[None, :],
            mask=(token[:, None] < num_tokens) & in_k,
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + expert[:, None] * size + k[None, :],
            mask=(expert[:, None] < num_experts) & in_k,
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    row = split.to(tl.int64) * num_tokens + token[:, None]
    tl.store(
        logits_ptr + row * PADDED_EXPERTS + expert[None, :], acc, mask=token[:, None] < num_tokens
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _top_k_kernel(
    logits_ptr,  # fp32 [SPLITS, num_tokens, PADDED_EXPERTS]
    experts_ptr,  # int32 [num_tokens, TOP_K]
    weights_ptr,  # fp32 [num_tokens, TOP_K]
    num_tokens,
    num_experts,
    SPLITS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    expert = tl.arange(0, PADDED_EXPERTS)[None, :]
    in_tokens = token[:, None] < num_tokens
    logits = tl.zeros([BLOCK_T, PADDED_EXPERTS], tl.float32)
    for split in tl.static_range(SPLITS):
        row = split * num_tokens + token[:, None]
        logits += tl.load(logits_ptr + row * PADDED_EXPERTS + expert, mask=in_tokens, other=0.0)
    logits = tl.where(expert < num_experts, logits, float("-inf"))
    exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    probs = exps / tl.sum(exps, axis=1)[:, None]
    probs = tl.where(probs == probs, probs, 0.0)  # of a NaN any valid expert may be chosen
    left = tl.where(expert < num_experts, probs, -1.0)
    slot = tl.arange(0, PADDED_K)[None, :]
    chosen = tl.zeros([BLOCK_T, PADDED_K], tl.int32)
    weights = tl.zeros([BLOCK_T, PADDED_K], tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, axis=1)[:, None]
        index = tl.min(tl.where(left == best, expert, PADDED_EXPERTS), axis=1)[:, None]
        left = tl.where(expert == index, -1.0, left)
        chosen = tl.where(slot == j, index, chosen)
        weights = tl.where(slot == j, best, weights)
    if NORMALISE:
        weights /= tl.sum(weights, axis=1)[:, None]
    out = token[:, None] * TOP_K + slot
    in_out = in_tokens & (slot < TOP_K)
    tl.store(experts_ptr + out, chosen, mask=in_out)
    tl.store(weights_ptr + out, weights, mask=in_out)


@triton.jit(do_not_specialize=["num_assignments", "num_tiles", "tile_size"])
def _sort_kernel(
    experts_ptr,  # int32 [num_assignments]
    order_ptr,  # int32 [num_assignments]
    tiles_ptr,  # int32 [num_tiles, 3]
    num_assignments,
    num_tiles,
    tile_size,
    BLOCK: tl.constexpr,
):
    """Program e places the assignments of expert e, and its tiles.

    Expert e's tiles start at min(b // tile_size + e, b), where b assignments are of lower experts.
    That leaves each expert as many as it needs: with c assignments, c / tile_size rounded up is at
    most (b + c) // tile_size + 1 - b // tile_size, and at most c.
    """
    expert = tl.program_id(0)
    num_below = tl.zeros([BLOCK], tl.int32)  # by place in a block
    num_mine = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_assignments, BLOCK):
        i = first + tl.arange(0, BLOCK)
        of = tl.load(experts_ptr + i, mask=i < num_assignments, other=0x7FFFFFFF)
        num_below += (of < expert).to(tl.int32)
        num_mine += (of == expert).to(tl.int32)
    below = tl.sum(num_below)
    count = tl.sum(num_mine)
    tile = min(below // tile_size + expert, below)
    end = below + count
    next_tile = min(end // tile_size + expert + 1, end)
    if expert == tl.num_programs(0) - 1:
        next_tile = num_tiles
    row = below
    for t in range(tile, next_tile):
        is_used = row < end
        tl.store(tiles_ptr + t * 3, tl.where(is_used, expert, -1))
        tl.store(tiles_ptr + t * 3 + 1, row)
        tl.store(tiles_ptr + t * 3 + 2, tl.minimum(row + tile_size, end))
        row += tile_size
    if count > 0:
        position = below
        for first in range(0, num_assignments, BLOCK):
            i = first + tl.arange(0, BLOCK)
            of = tl.load(experts_ptr + i, mask=i < num_assignments, other=0x7FFFFFFF)
            is_mine = (of == expert).to(tl.int32)
            place = position + tl.cumsum(is_mine, axis=0) - 1
            tl.store(order_ptr + place, i, mask=is_mine != 0)
            position += tl.sum(is_mine)


@dataclass(frozen=True, slots=True)
class Routing:
    """What the grouped matmuls know of a batch.

    weights: fp32 [num_tokens, top_k], of each assignment.
    order: int32 [num_tokens * top_k], the assignments by expert, of one expert by token.
    tiles: int32 [num_tiles, 3], of each tile its expert (-1: unused), its first place in `order`,
        and the place after its last.
    """

    weights: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor

    @property
    def top_k(self) -> int:
        return self.weights.shape[1]


def choose_experts(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, *, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the router's softmax in fp32 and takes each token's `top_k` largest probabilities,
    the lower expert first in a tie.

    x [t, size], weight [num_experts, size] -> experts int32 and weights fp32, [t, top_k] each.
    normalise: whether the weights of a token are divided by their sum.
    """
    num_tokens, size = x.shape
    num_experts = len(weight)
    padded = max(triton.next_power_of_2(num_experts), 16)
    is_half = x.element_size() == 2
    block_t, most_splits = (64, 2) if is_half and num_tokens > FEW_TOKENS else (16, 8)
    block_k = 64 if is_half else 32
    size_per_split = triton.cdiv(triton.cdiv(size, most_splits), block_k) * block_k
    splits = triton.cdiv(size, size_per_split)
    logits = x.new_empty(splits, num_tokens, padded, dtype=torch.float32)
    _router_logits_kernel[(triton.cdiv(num_tokens, block_t), splits)](
        x,
        weight,
        logits,
        num_tokens,
        num_experts,
        size,
        size_per_split,
        PADDED_EXPERTS=padded,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=4,
    )
    experts = x.new_empty(num_tokens, top_k, dtype=torch.int32)
    weights = x.new_empty(num_tokens, top_k, dtype=torch.float32)
    _top_k_kernel[(triton.cdiv(num_tokens, TOKENS_OF_TOP_K),)](
        logits,
        experts,
        weights,
        num_tokens,
        num_experts,
        SPLITS=splits,
        PADDED_EXPERTS=padded,
        TOP_K=top_k,
        PADDED_K=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        BLOCK_T=TOKENS_OF_TOP_K,
        num_warps=4,
    )
    return experts, weights


def sort_by_expert(
    experts: torch.Tensor, weights: torch.Tensor, num_experts: int, tile_size: int
) -> Routing:
    """Orders assignments by expert, and cuts each expert's into tiles of at most `tile_size`.

    experts int32 and weights fp32, [t, top_k] each
    """
    num_assignments = experts.numel()
    num_tiles = min(num_assignments // tile_size + num_experts, num_assignments)
    order = torch.empty_like(experts).view(-1)
    tiles = experts.new_empty(num_tiles, 3)
    _sort_kernel[(num_experts,)](
        experts,
        order,
        tiles,
        num_assignments,
        num_tiles,
        tile_size,
        BLOCK=SORT_BLOCK,
        num_warps=8,
    )
    return Routing(weights, order, tiles)
