"""Embeddings of tokens, of which this rank has a share of the vocabulary's."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _embed_share_kernel(
    token_ids_ptr, weight_ptr, out_ptr, first_id, num_ids, size, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids_ptr + token) - first_id
    num_known = tl.where((row >= 0) & (row < num_ids), size, 0)  # values of it that are here
    values = tl.load(weight_ptr + row * size + cols, mask=cols < num_known, other=0.0)
    tl.store(out_ptr + token * size + cols, values, mask=cols < size)


def embed_share(
    token_ids: torch.Tensor, weight: torch.Tensor, first_id: int, num_ids: int
) -> torch.Tensor:
    """token_ids int64 [t]; weight [>= num_ids, size], of the ids from `first_id` on -> [t, size],
    zeros for other ids"""
    num_tokens, size = len(token_ids), weight.shape[1]
    out = weight.new_empty(num_tokens, size)
    _embed_share_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        token_ids,
        weight,
        out,
        first_id,
        num_ids,
        size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
