"""The sampler of layers/sampler.py in one pass over the logits, bit for bit the same hash.

A program finds the best (score, id) of one chunk of one row; a second kernel picks each row's best
chunk and leaves the id in the row state.
"""

import torch
import triton
import triton.language as tl

CHUNK = 8192
TILE = 1024


@triton.jit
def _hash32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise_keys(seed, position):
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    inner = _hash32(low ^ _hash32(position.to(tl.uint32)))
    first = _hash32(high + inner)
    return first, _hash32(first * 0x9E3779B1 + inner)


@triton.jit
def _gumbel_noise(token_id, first, second):
    x = token_id.to(tl.uint32) ^ first
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += second
    x *= 0x846CA68B
    x ^= x >> 16
    uniform = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log1p(-u): the series where 1 - u would round away what makes the noise large.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    exponential = tl.where(uniform < 0.0078125, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["num_chunks"])
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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows_ptr + n)
    if row < 0:
        return
    temperature = tl.load(temperatures_ptr + row)
    first, second = _noise_keys(tl.load(seeds_ptr + row), tl.load(context_lens_ptr + row))
    best_score = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab), TILE):
        token_id = start + tl.arange(0, TILE)
        mask = token_id < vocab
        score = tl.load(logits_ptr + n * vocab + token_id, mask=mask, other=float("-inf"))
        score = score.to(tl.float32)
        if temperature > 0:
            score = score / temperature + _gumbel_noise(token_id, first, second)
        is_better = score > best_score  # strictly: the lower id stays
        best_score = tl.where(is_better, score, best_score)
        best_id = tl.where(is_better, token_id, best_id)
    top = tl.max(best_score, 0)
    top_id = tl.min(tl.where(best_score == top, best_id, 0x7FFFFFFF), 0)
    tl.store(best_score_ptr + n * num_chunks + chunk, top)
    tl.store(best_id_ptr + n * num_chunks + chunk, top_id)


@triton.jit(do_not_specialize=["num_chunks"])
def _best_of_row_kernel(
    best_score_ptr,
    best_id_ptr,
    rows_ptr,
    last_tokens_ptr,
    sampled_ptr,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    n = tl.program_id(0)
    row = tl.load(rows_ptr + n)
    if row < 0:
        return
    chunk = tl.arange(0, CHUNKS)
    mask = chunk < num_chunks
    score = tl.load(best_score_ptr + n * num_chunks + chunk, mask=mask, other=float("-inf"))
    token_id = tl.load(best_id_ptr + n * num_chunks + chunk, mask=mask, other=0x7FFFFFFF)
    best = tl.min(tl.where(score == tl.max(score, 0), token_id, 0x7FFFFFFF), 0).to(tl.int64)
    tl.store(sampled_ptr + n, best)
    tl.store(last_tokens_ptr + row, best)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    context_lens: torch.Tensor,
    last_tokens: torch.Tensor,
) -> torch.Tensor:
    """Samples one token for each of `rows` and makes it the row's last token.

    logits [n, vocab]; rows int64 [n], -1 for padding, whose result is arbitrary; the others are
    per-row state: context_lens, of the tokens before the sampled one, is its position.
    -> token ids int64 [n]
    """
    n, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK)
    best_score = logits.new_empty(n, num_chunks, dtype=torch.float32)
    best_id = logits.new_empty(n, num_chunks, dtype=torch.int32)
    sampled = logits.new_empty(n, dtype=torch.int64)
    _best_of_chunk_kernel[(n, num_chunks)](
        logits,
        rows,
        temperatures,
        seeds,
        context_lens,
        best_score,
        best_id,
        vocab,
        num_chunks,
        CHUNK=CHUNK,
        TILE=TILE,
        num_warps=4,
    )
    _best_of_row_kernel[(n,)](
        best_score,
        best_id,
        rows,
        last_tokens,
        sampled,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return sampled
