"""Log probabilities of ids, and the most likely ids, in two passes over the logits of a row.

The first pass keeps the best logit of each lane, that is of ids that are equal modulo the tile.
Then the best of all lanes is taken again and again; only the lane that had it is looked through for
its next one.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ordered import ordered_key
from nanovllm.utils.special_rows import TopLogprobs

TILE = 4096
NUM_WARPS = 16


@triton.jit
def _ranked(z, token_id, mask):
    """Returns int64 numbers that rank logits, of equals the lower ids first."""
    rank = (ordered_key(z, 0).to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)
    return tl.where(mask, rank, -0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=["num_top"])
def _logprobs_kernel(
    logits_ptr,  # [n, vocab], rows `stride` apart
    index_ptr,
    token_ids_ptr,
    ids_ptr,  # [m, 1 + num_top]
    logprobs_ptr,
    vocab,
    stride,
    num_top,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of a row, padded to a power of two
):
    n = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.load(index_ptr + n) * stride
    ranks = tl.full([TILE], -0x7FFFFFFFFFFFFFFF, tl.int64)
    best = tl.full([TILE], float("-inf"), tl.float32)
    for tile in range(0, vocab, TILE):
        token_id = tile + tl.arange(0, TILE)
        mask = token_id < vocab
        z = tl.load(row_ptr + token_id, mask=mask, other=float("-inf")).to(tl.float32)
        ranks = tl.maximum(ranks, _ranked(z, token_id, mask))
        best = tl.maximum(best, z)
    top = tl.max(best, 0)
    total = tl.zeros([TILE], tl.float32)
    for tile in range(0, vocab, TILE):
        token_id = tile + tl.arange(0, TILE)
        z = tl.load(row_ptr + token_id, mask=token_id < vocab, other=float("-inf"))
        total += tl.exp(z.to(tl.float32) - top)
    normaliser = top + tl.log(tl.sum(total, 0))
    own = tl.load(token_ids_ptr + n)
    out = n * (1 + num_top)
    tl.store(ids_ptr + out, own)
    tl.store(logprobs_ptr + out, tl.load(row_ptr + own).to(tl.float32) - normaliser)
    for i in range(num_top):
        rank = tl.max(ranks, 0)
        token_id = 0x7FFFFFFF - (rank & 0x7FFFFFFF)
        tl.store(ids_ptr + out + 1 + i, token_id)
        tl.store(
            logprobs_ptr + out + 1 + i, tl.load(row_ptr + token_id).to(tl.float32) - normaliser
        )
        lane = token_id % TILE
        ids = lane + TILE * tl.arange(0, TILES)
        mask = ids < vocab
        z = tl.load(row_ptr + ids, mask=mask, other=0.0).to(tl.float32)
        lane_ranks = _ranked(z, ids, mask)
        following = tl.max(tl.where(lane_ranks < rank, lane_ranks, -0x7FFFFFFFFFFFFFFF), 0)
        ranks = tl.where(tl.arange(0, TILE) == lane, following, ranks)


def top_logprobs(
    logits: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> TopLogprobs:
    """Does what `top_logprobs` of layers/filters.py does; `num_top` is at most the vocabulary."""
    m, vocab = len(index), logits.shape[1]
    ids = token_ids.new_empty(m, 1 + num_top)
    logprobs = logits.new_empty(m, 1 + num_top, dtype=torch.float32)
    _logprobs_kernel[(m,)](
        logits,
        index,
        token_ids,
        ids,
        logprobs,
        vocab,
        logits.stride(0),
        num_top,
        TILE=TILE,
        TILES=triton.next_power_of_2(triton.cdiv(vocab, TILE)),
        num_warps=NUM_WARPS,
    )
    return TopLogprobs(ids, logprobs)
