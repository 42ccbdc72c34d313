"""A step of decode attention over K and V in 8 bits: one tile of keys of one sequence.

Keys are the rows of the products and queries the columns, of which 8 are enough for tensor cores;
as rows there had to be 16. That halves the products and the softmax, which with half the bytes per
key would take longer than the reads.
"""

import triton
import triton.language as tl

from nanovllm.kernels.kv_format import load_scales, widened


@triton.jit
def attend_to_codes(
    q, q_scale, acc, running_sum, running_max,
    k_cache_ptr, v_cache_ptr, kv_scales_ptr, slot, kv_head, in_context,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, IS_ON_GPU: tl.constexpr,
):  # fmt: skip
    """Takes one step of the online softmax, over the keys in the slots [TILE].

    q [D, queries] and q_scale [queries]: see `fitted_queries`. acc: [D, queries].
    in_context: bool [TILE], which keys count.
    Returns the new (acc, running_sum, running_max).
    """
    d = tl.arange(0, D)
    offset = ((slot * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + d[None, :]
    if BLOCK_SIZE >= TILE and HEAD_DIM == D:  # a whole tile of the pool, where all codes are finite
        k_codes = tl.load(k_cache_ptr + offset)
        v_codes = tl.load(v_cache_ptr + offset)
    else:
        mask = in_context[:, None] & (d < HEAD_DIM)[None, :]
        k_codes = tl.load(k_cache_ptr + offset, mask=mask, other=0)
        v_codes = tl.load(v_cache_ptr + offset, mask=mask, other=0)
    pair = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    k_scale, v_log2, v_inverse = load_scales(kv_scales_ptr, pair, in_context)
    k = widened(k_codes, q.dtype, IS_ON_GPU, True)
    scores = tl.dot(k, q, input_precision=PRECISION)
    # A weight is a probability times V's scale, so that it fits fp16.
    scores = scores * q_scale[None, :] * k_scale[:, None] + v_log2[:, None]
    scores = tl.where(in_context[:, None], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 0))
    weights = tl.exp2(scores - new_max[None, :])
    correction = tl.exp2(running_max - new_max)
    running_sum = running_sum * correction + tl.sum(weights * v_inverse[:, None], 0)
    v = widened(v_codes, q.dtype, IS_ON_GPU, False)
    wv = tl.dot(tl.trans(v), weights.to(q.dtype), input_precision=PRECISION)
    return acc * correction[None, :] + wv, running_sum, new_max
