"""Embedding lookup where each rank holds a share of the vocabulary."""

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
    local_id = tl.load(token_ids_ptr + token) - first_id
    is_local = (local_id >= 0) & (local_id < num_ids)
    num_held = tl.where(is_local, size, 0)  # values of the embedding that this rank holds
    values = tl.load(weight_ptr + local_id * size + cols, mask=cols < num_held, other=0.0)
    tl.store(out_ptr + token * size + cols, values, mask=cols < size)


def embed_share(
    token_ids: torch.Tensor, weight: torch.Tensor, first_id: int, num_ids: int
) -> torch.Tensor:
    """Looks up tokens in this rank's share, the `num_ids` ids from `first_id` on.

    token_ids int64 [t]; weight [>= num_ids, size] -> [t, size], zeros for ids of other ranks, so
    that the sum over the ranks is the embedding
    """
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
