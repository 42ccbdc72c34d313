"""The sampler of layers/sampler.py in one pass over the logits, with the same hash bit for bit.

A program finds the best (score, id) of one chunk of one row's logits. A second kernel picks each
row's best over the chunks of all ranks and stores the id in the runner's per-row state.

Gumbel noise takes two logarithms per id, which would cost more than reading the logits. So the
noise is first bounded from above by its bits alone, and only tiles whose bound beats the best score
so far are computed exactly: a handful, since new maxima become rare.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import (
    dependent_launch,
    let_next_start,
    wait_for_previous,
)
from nanovllm.utils.sampling_state import SamplingState

TILE = 256  # ids; a program is one warp, so it can skip a tile without a block-wide vote
STAGES = 3  # tiles of logits in flight
TARGET_PROGRAMS = 4096  # enough to fill a GPU; fewer, longer chunks would skip more tiles


@triton.jit
def _hash32(x):
    """Returns the hash lowbias32 (C. Wellons) of uint32 values."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise_keys(seed, position):
    """Returns the two uint32 keys from which the noise of a row at a position is hashed."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    inner = _hash32(low ^ _hash32(position.to(tl.uint32)))
    first = _hash32(high + inner)
    second = _hash32(first * 0x9E3779B1 + inner)
    return first, second * 0x846CA68B  # here, once: (x + second) * c = x * c + second * c


@triton.jit
def _noise_bits(token_id, first, second):
    """Returns 32 uniform random bits per token id, hashed with the two keys of `_noise_keys`."""
    x = token_id.to(tl.uint32) ^ first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x = x * 0x846CA68B + second
    return x ^ (x >> 16)


@triton.jit
def _gumbel_noise(bits):
    """Returns standard Gumbel noise, fp32, made from 32 uniform random bits each."""
    # Uniform in (0, 1), and precise near 0, where the largest noise comes from.
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # -log1p(-u), by its series where u is so small that 1 - u would lose its digits.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    exponential = tl.where(uniform < 0.0078125, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _gumbel_bound(bits):
    """Returns an upper bound, up to rounding, of `_gumbel_noise(bits)` without a logarithm.

    -log(-log1p(-u)) <= -log(u), and the bits of a float read as an integer, scaled and shifted, are
    a lower bound of its base-2 logarithm.
    """
    float_bits = bits.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    return 110.2105 - float_bits * 8.262958294867817e-08  # (32 + 127) ln 2 - float_bits ln 2 / 2^23


@triton.jit(do_not_specialize=["num_chunks", "tiles_per_chunk"])
def _best_of_chunk_kernel(
    logits_ptr,  # [n, vocab]
    rows_ptr,  # [n], -1 for padding
    temperatures_ptr,
    seeds_ptr,
    context_lens_ptr,
    best_score_ptr,  # [n, num_chunks]
    best_id_ptr,
    vocab,
    num_chunks,
    tiles_per_chunk,
    first_id,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    let_next_start(HAS_PDL)
    wait_for_previous(HAS_PDL)
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + n)
    if row < 0:
        return
    temperature = tl.load(temperatures_ptr + row)
    is_random = temperature > 0
    inverse = 1.0 / tl.where(is_random, temperature, 1.0)
    first, second = _noise_keys(tl.load(seeds_ptr + row), tl.load(context_lens_ptr + row))
    best_score = float("-inf")
    largest = tl.full([TILE], float("-inf"), tl.float32)  # of each lane; NaN if a logit was
    start = chunk * tiles_per_chunk * TILE
    best_id = start  # a valid id even if all logits are NaN
    end = tl.minimum(start + tiles_per_chunk * TILE, vocab)
    for tile in tl.range(start, end, TILE, num_stages=STAGES):
        token_id = tile + tl.arange(0, TILE)
        logit = tl.load(
            logits_ptr + n * vocab + token_id, mask=token_id < vocab, other=float("-inf")
        ).to(tl.float32)
        largest = tl.maximum(largest, logit, propagate_nan=tl.PropagateNan.ALL)
        bits = _noise_bits(first_id + token_id, first, second)
        bound = tl.max(logit * inverse + _gumbel_bound(bits), 0)
        # The slack covers the rounding of the bound.
        if (bound + 0.01 + 1e-6 * tl.abs(bound) > best_score) | (temperature <= 0):
            score = logit
            if is_random:
                score = logit / temperature + _gumbel_noise(bits)
            tile_best = tl.max(score, 0)
            if tile_best > best_score:  # strictly, so that the lowest id wins a tie
                best_score = tile_best
                best_id = tl.min(tl.where(score == tile_best, token_id, 0x7FFFFFFF), 0)
    has_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    best_score = tl.where(has_nan, float("inf"), best_score)  # so that the row's best is infinite
    tl.store(best_score_ptr + n * num_chunks + chunk, best_score)
    tl.store(best_id_ptr + n * num_chunks + chunk, first_id + best_id)


@triton.jit(do_not_specialize=["num_chunks", "size"])
def _best_of_row_kernel(
    best_ptr,  # [NUM_RANKS, 2, size]: bits of the scores, ids; each [n, num_chunks] and padding
    rows_ptr,
    last_tokens_ptr,
    sampled_ptr,
    num_chunks,
    size,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,  # NUM_RANKS padded to a power of two, as CHUNKS is
    CHUNKS: tl.constexpr,
    HAS_PDL: tl.constexpr,
):
    let_next_start(HAS_PDL)
    wait_for_previous(HAS_PDL)
    n = tl.program_id(0)
    row = tl.load(rows_ptr + n)
    if row < 0:
        return
    rank, chunk = tl.arange(0, RANKS * CHUNKS) // CHUNKS, tl.arange(0, RANKS * CHUNKS) % CHUNKS
    mask = (rank < NUM_RANKS) & (chunk < num_chunks)
    score_ptr = best_ptr + rank * 2 * size + n * num_chunks + chunk
    bits = tl.load(score_ptr, mask=mask, other=0)
    score = tl.where(mask, bits.to(tl.float32, bitcast=True), float("-inf"))
    token_id = tl.load(score_ptr + size, mask=mask, other=0x7FFFFFFF)
    top = tl.max(score, 0)
    best = tl.min(tl.where(score == top, token_id, 0x7FFFFFFF), 0).to(tl.int64)
    tl.store(sampled_ptr + n, tl.where(tl.abs(top) < float("inf"), best, -1))
    tl.store(last_tokens_ptr + row, best)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    first_id: int = 0,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Samples one token for each of `rows` and stores it as the row's last token.

    logits [n, vocab] of the ids from `first_id` on; rows int64 [n] of `state`, -1 for padding
    -> token ids int64 [n], arbitrary for padding, -1 where a logit is NaN or the best score
    infinite; the row's last token is a valid id even then

    gather: gathers a tensor from all ranks, int32 [...] -> [ranks, ...]; None for one rank.
    """
    n, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, TILE)
    tiles_per_chunk = triton.cdiv(num_tiles, triton.cdiv(TARGET_PROGRAMS, n))
    num_chunks = triton.cdiv(num_tiles, tiles_per_chunk)
    # Both halves start at multiples of 16 bytes, an alignment for which Triton specialises.
    best = logits.new_empty(2, triton.cdiv(n * num_chunks, 4) * 4, dtype=torch.int32)
    sampled = logits.new_empty(n, dtype=torch.int64)
    _best_of_chunk_kernel[(n, num_chunks)](
        logits,
        rows,
        state.temperatures,
        state.seeds,
        state.context_lens,
        best[0].view(torch.float32),
        best[1],
        vocab,
        num_chunks,
        tiles_per_chunk,
        first_id,
        TILE=TILE,
        STAGES=STAGES,
        num_warps=1,
        **dependent_launch(logits.device),
    )
    best_of_ranks = best.unsqueeze(0) if gather is None else gather(best)
    _best_of_row_kernel[(n,)](
        best_of_ranks,
        rows,
        state.last_tokens,
        sampled,
        num_chunks,
        best.shape[1],
        NUM_RANKS=len(best_of_ranks),
        RANKS=triton.next_power_of_2(len(best_of_ranks)),
        CHUNKS=triton.next_power_of_2(num_tiles),
        num_warps=1,
        **dependent_launch(logits.device),
    )
    return sampled
