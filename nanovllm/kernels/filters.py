"""min_p, top_k and top_p of layers/filters.py, and the draw from what they keep, without a sort.

One program takes one row. What a filter keeps are the logits above a threshold, and of those that
equal it so many with the lowest ids. The threshold is found among the ordered bits of the logits: a
pass over the row adds up the number, or the probability, of the logits above seven keys at once,
which leaves an eighth of the interval. All sums have a fixed order, so results repeat.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ordered import ordered_key, value_of_key
from nanovllm.kernels.sampler import _gumbel_bound, _gumbel_noise, _noise_bits, _noise_keys
from nanovllm.utils.sampling_state import SamplingState
from nanovllm.utils.special_rows import FilterRows

TILE = 4096  # ids at a time
NUM_WARPS = 16
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
ALL = tl.constexpr(1 << 30)  # more than any vocabulary


@triton.jit
def _load(row_ptr, tile, vocab, TILE: tl.constexpr):
    """Returns ids from `tile` on and their logits, fp32, -inf beyond the vocabulary."""
    token_id = tile + tl.arange(0, TILE)
    z = tl.load(row_ptr + token_id, mask=token_id < vocab, other=float("-inf"))
    return token_id, z.to(tl.float32)


@triton.jit(noinline=True)
def _find_key(
    row_ptr,
    vocab,
    low,
    high,
    target,
    top,
    inverse,
    IS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the largest key in [low, high) with an amount of at least `target` in logits of this
    key or above, and the amount above it, fp64.

    The amount is a number of logits or, with `IS_MASS`, the sum of exp((logit - top) * inverse).
    That of `low` must reach the target, and that of `high` must not.
    """
    above = target * 0
    while high - low > 1:
        step = (high - low + 7) // 8
        k1, k2, k3, k4 = low + step, low + 2 * step, low + 3 * step, low + 4 * step
        k5, k6, k7 = low + 5 * step, low + 6 * step, low + 7 * step
        # Keys of 32 bits are compared faster; beyond them there is nothing to find.
        b1, b2, b3, b4 = _to_int32(k1), _to_int32(k2), _to_int32(k3), _to_int32(k4)
        b5, b6, b7 = _to_int32(k5), _to_int32(k6), _to_int32(k7)
        a1 = tl.zeros([TILE], tl.float32)
        a2, a3, a4, a5, a6, a7 = a1, a1, a1, a1, a1, a1
        for tile in range(0, vocab, TILE):
            token_id, z = _load(row_ptr, tile, vocab, TILE)
            key = ordered_key(z, SHIFT)
            one = tl.where(token_id < vocab, 1.0, 0.0)
            if IS_MASS:
                one = tl.exp((z - top) * inverse)
            a1 += tl.where(key >= b1, one, 0.0)
            a2 += tl.where(key >= b2, one, 0.0)
            a3 += tl.where(key >= b3, one, 0.0)
            a4 += tl.where(key >= b4, one, 0.0)
            a5 += tl.where(key >= b5, one, 0.0)
            a6 += tl.where(key >= b6, one, 0.0)
            a7 += tl.where(key >= b7, one, 0.0)
        # Downwards: each key whose amount does not reach the target bounds the interval.
        low, high, above = _narrowed(low, high, above, k7, tl.sum(a7, 0), target)
        low, high, above = _narrowed(low, high, above, k6, tl.sum(a6, 0), target)
        low, high, above = _narrowed(low, high, above, k5, tl.sum(a5, 0), target)
        low, high, above = _narrowed(low, high, above, k4, tl.sum(a4, 0), target)
        low, high, above = _narrowed(low, high, above, k3, tl.sum(a3, 0), target)
        low, high, above = _narrowed(low, high, above, k2, tl.sum(a2, 0), target)
        low, high, above = _narrowed(low, high, above, k1, tl.sum(a1, 0), target)
    return low, above


@triton.jit
def _to_int32(key):
    return tl.minimum(key, 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _narrowed(low, high, above, key, amount, target):
    """Returns the interval [low, high) and the amount at `high`, narrowed by that at `key`."""
    amount = amount.to(tl.float64)
    is_inside = (key > low) & (key < high)
    reaches = amount >= target
    above = tl.where(is_inside & ~reaches, amount, above)
    high = tl.where(is_inside & ~reaches, key, high)
    return tl.where(is_inside & reaches, key, low), high, above


@triton.jit
def _id_of_tie(row_ptr, vocab, threshold, num, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Returns the `num`-th lowest id whose logit has the key `threshold`, a large one if fewer
    have."""
    found = num * 0
    last = num * 0 + ALL
    tile = num * 0
    while (found < num) & (tile < vocab):
        token_id, z = _load(row_ptr, tile, vocab, TILE)
        is_tie = (ordered_key(z, SHIFT) == threshold) & (token_id < vocab)
        count = tl.sum(is_tie.to(tl.int32), 0)
        if found + count >= num:
            rank = tl.cumsum(is_tie.to(tl.int32), 0)
            last = tl.min(tl.where(is_tie & (rank >= num - found), token_id, ALL), 0)
        found += count
        tile += TILE
    return last


@triton.jit
def _least_key(value, SHIFT: tl.constexpr):
    """Returns the lowest key of a logit that is at least `value`, fp64."""
    key = ordered_key(value.to(tl.float32), SHIFT)
    return key + (value_of_key(key, SHIFT).to(tl.float64) < value).to(tl.int32)


@triton.jit
def _kth_of_tile(keys, k, low, high):
    """Returns the k-th largest of `keys`, all in [low, high)."""
    while high - low > 1:
        middle = low + (high - low) // 2
        reaches = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
    return low


@triton.jit
def _draw_kernel(
    logits_ptr,  # [n, vocab], rows `stride` apart
    index_ptr,
    rows_ptr,
    top_ks_ptr,
    top_ps_ptr,
    log_min_ps_ptr,
    temperatures_ptr,
    seeds_ptr,
    context_lens_ptr,
    last_tokens_ptr,
    drawn_ptr,
    vocab,
    stride,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    row_ptr = logits_ptr + tl.load(index_ptr + n) * stride
    temperature = tl.load(temperatures_ptr + row)
    is_random = temperature > 0
    temperature = tl.where(is_random, temperature, 1.0)
    inverse = 1.0 / temperature
    threshold = ordered_key(temperature * 0 + float("-inf"), SHIFT)  # keeps all
    num_ties = threshold * 0 + ALL
    if is_random:
        best = tl.full([TILE], float("-inf"), tl.float32)
        for tile in range(0, vocab, TILE):
            _, z = _load(row_ptr, tile, vocab, TILE)
            best = tl.maximum(best, z)
        top = tl.max(best, 0)
        end = ordered_key(top, SHIFT).to(tl.int64) + 1
        scale = temperature.to(tl.float64)
        lowest = top.to(tl.float64) + scale * tl.load(log_min_ps_ptr + n)
        threshold = tl.maximum(threshold, _least_key(lowest, SHIFT))
        top_k = tl.load(top_ks_ptr + n)
        if (top_k > 0) & (top_k < vocab):
            low = threshold.to(tl.int64)
            if top_k <= TILE:  # the k-th largest of the best is no more than that of all
                keys = ordered_key(best, SHIFT).to(tl.int64)
                nothing = ordered_key(temperature * 0 + float("-inf"), SHIFT).to(tl.int64)
                low = tl.maximum(low, _kth_of_tile(keys, top_k, nothing, end))
            kth, above = _find_key(
                row_ptr, vocab, low, end, top_k.to(tl.float64), top, inverse,
                False, SHIFT, TILE,
            )  # fmt: skip
            # Where min_p has left fewer than k, this is its threshold, and more than its ties.
            threshold = kth.to(tl.int32)
            num_ties = (top_k - above.to(tl.int64)).to(tl.int32)
        top_p = tl.load(top_ps_ptr + n)
        if top_p < 1:
            mass = tl.zeros([TILE], tl.float32)
            ties = tl.zeros([TILE], tl.int32)
            for tile in range(0, vocab, TILE):
                _, z = _load(row_ptr, tile, vocab, TILE)
                key = ordered_key(z, SHIFT)
                mass += tl.where(key > threshold, tl.exp((z - top) * inverse), 0.0)
                ties += (key == threshold).to(tl.int32)
            one = tl.exp((value_of_key(threshold, SHIFT) - top) * inverse).to(tl.float64)
            num = tl.minimum(num_ties, tl.sum(ties, 0)).to(tl.float64)
            target = top_p * (tl.sum(mass, 0).to(tl.float64) + num * one)
            # What lies below has together less than 1 - top_p, as the largest logit alone has 1.
            spread = tl.log((1 - top_p) / (2.0 * vocab))
            first = ordered_key((top.to(tl.float64) + scale * spread).to(tl.float32), SHIFT) - 1
            first = tl.maximum(threshold, first)
            reached, above = _find_key(
                row_ptr, vocab, first.to(tl.int64), end, target, top, inverse,
                True, SHIFT, TILE,
            )  # fmt: skip
            last = reached.to(tl.int32)
            one = tl.exp((value_of_key(last, SHIFT) - top) * inverse).to(tl.float64)
            need = tl.ceil((target - above) / one)
            need = tl.minimum(tl.maximum(need, 1.0), ALL + 0.0).to(tl.int32)
            num_ties = tl.where(last == threshold, tl.minimum(num_ties, need), need)
            threshold = last
    last_tie = threshold * 0 + ALL
    if num_ties < ALL:
        last_tie = _id_of_tie(row_ptr, vocab, threshold, num_ties, SHIFT, TILE)
    best_id = _best_kept(
        row_ptr, vocab, threshold, last_tie, is_random, temperature, inverse,
        tl.load(seeds_ptr + row), tl.load(context_lens_ptr + row),
        SHIFT, TILE,
    )  # fmt: skip
    tl.store(drawn_ptr + n, best_id.to(tl.int64))
    tl.store(last_tokens_ptr + row, tl.maximum(best_id, 0).to(tl.int64))


@triton.jit
def _best_kept(
    row_ptr,
    vocab,
    threshold,
    last_tie,
    is_random,
    temperature,
    inverse,
    seed,
    position,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the id of the largest score, of equals the lowest, among logits above the threshold
    and those equal to it up to the id `last_tie`; -1 if a logit is NaN or the largest infinite."""
    first, second = _noise_keys(seed, position)
    best_score = temperature * 0 + float("-inf")
    best_id = last_tie * 0
    largest = tl.full([TILE], float("-inf"), tl.float32)  # of each lane; NaN if a logit was
    for tile in range(0, vocab, TILE):
        token_id, z = _load(row_ptr, tile, vocab, TILE)
        largest = tl.maximum(largest, z, propagate_nan=tl.PropagateNan.ALL)
        key = ordered_key(z, SHIFT)
        is_kept = (key > threshold) | ((key == threshold) & (token_id <= last_tie))
        z = tl.where(is_kept, z, float("-inf"))
        bits = _noise_bits(token_id, first, second)
        bound = tl.max(z * inverse + _gumbel_bound(bits), 0)
        # The slack covers the rounding of the bound.
        if (bound + 0.01 + 1e-6 * tl.abs(bound) > best_score) | (not is_random):
            score = z
            if is_random:
                score = z / temperature + _gumbel_noise(bits)
            tile_best = tl.max(score, 0)
            if tile_best > best_score:  # strictly, so that the lowest id wins a tie
                best_score = tile_best
                best_id = tl.min(tl.where(score == tile_best, token_id, ALL), 0)
    has_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    is_finite = tl.abs(tl.max(largest, 0)) < float("inf")
    return tl.where(is_finite & ~has_nan, best_id, -1)


def draw_filtered(logits: torch.Tensor, filters: FilterRows, state: SamplingState) -> torch.Tensor:
    """Does what `draw_filtered` of layers/filters.py does."""
    drawn = torch.empty_like(filters.rows)
    _draw_kernel[(len(drawn),)](
        logits,
        filters.index,
        filters.rows,
        filters.top_ks,
        filters.top_ps,
        filters.log_min_ps,
        state.temperatures,
        state.seeds,
        state.context_lens,
        state.last_tokens,
        drawn,
        logits.shape[1],
        logits.stride(0),
        SHIFT=SHIFTS[logits.dtype],
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
    return drawn
