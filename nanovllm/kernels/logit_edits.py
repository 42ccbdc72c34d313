"""Biases, allowed ids, min_tokens and penalties of layers/filters.py, on fp32 copies of logits.

Only the logits that change are touched, by one program a row, after a kernel that copies the rows.
Repeated tokens of a history are counted in a table by atomic additions. Whoever then takes a count
out of the table, again atomically, applies the penalty for all of them: so the result does not
depend on the order.
"""

import torch
import triton
import triton.language as tl

from nanovllm.utils.sampling_state import SamplingState
from nanovllm.utils.special_rows import EditRows

TILE = 1024
IN_PROMPT = tl.constexpr(1 << 30)  # of a count: the token occurs in the prompt


@triton.jit
def _copy_kernel(logits_ptr, index_ptr, is_only_ptr, out_ptr, vocab, stride, TILE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    token_id = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = token_id < vocab
    ptr = logits_ptr + tl.load(index_ptr + n) * stride + token_id
    z = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    z = tl.where(tl.load(is_only_ptr + n) != 0, float("-inf"), z)
    tl.store(out_ptr + n * vocab + token_id, z, mask=mask)


@triton.jit
def _edit_kernel(
    logits_ptr,
    index_ptr,
    rows_ptr,
    context_lens_ptr,
    num_edits_ptr,
    id_addresses_ptr,
    bias_addresses_ptr,
    min_lens_ptr,
    out_ptr,
    vocab,
    stride,
    TILE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    num = tl.load(num_edits_ptr + n)
    ids_ptr = tl.load(id_addresses_ptr + n).to(tl.pointer_type(tl.int64))
    biases_ptr = tl.load(bias_addresses_ptr + n).to(tl.pointer_type(tl.float64))
    length = tl.load(context_lens_ptr + tl.load(rows_ptr + n))
    is_early = length < tl.load(min_lens_ptr + n)
    row_ptr = logits_ptr + tl.load(index_ptr + n) * stride
    for start in range(0, num, TILE):
        edit = start + tl.arange(0, TILE)
        mask = edit < num
        token_id = tl.load(ids_ptr + edit, mask=mask, other=0)
        is_late = token_id < 0
        token_id = tl.where(is_late, ~token_id, token_id)
        z = tl.load(row_ptr + token_id, mask=mask, other=0.0).to(tl.float32)
        z += tl.load(biases_ptr + edit, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(is_late & is_early, float("-inf"), z)
        tl.store(out_ptr + n * vocab + token_id, z, mask=mask)


@triton.jit
def _count_kernel(
    history_ptr,  # [max rows, width]
    rows_ptr,
    context_lens_ptr,
    num_prompts_ptr,
    counts_ptr,  # [m, vocab], zeros
    vocab,
    width,
    TILE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    length = tl.load(context_lens_ptr + row)
    num_prompt = tl.load(num_prompts_ptr + n)
    for start in range(0, length, TILE):
        position = start + tl.arange(0, TILE)
        mask = position < length
        token_id = tl.load(history_ptr + row * width + position, mask=mask, other=0)
        ptr = counts_ptr + n * vocab + token_id
        tl.atomic_or(ptr, IN_PROMPT, mask=mask & (position < num_prompt), sem="relaxed")
        tl.atomic_add(ptr, 1, mask=mask & (position >= num_prompt), sem="relaxed")


@triton.jit
def _penalty_kernel(
    history_ptr,
    rows_ptr,
    context_lens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    out_ptr,
    vocab,
    width,
    TILE: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    length = tl.load(context_lens_ptr + row)
    repetition = tl.load(repetition_ptr + n).to(tl.float32)
    presence = tl.load(presence_ptr + n).to(tl.float32)
    frequency = tl.load(frequency_ptr + n).to(tl.float32)
    for start in range(0, length, TILE):
        position = start + tl.arange(0, TILE)
        mask = position < length
        token_id = tl.load(history_ptr + row * width + position, mask=mask, other=0)
        count = tl.atomic_xchg(counts_ptr + n * vocab + token_id, 0, mask=mask, sem="relaxed")
        mask &= count != 0
        z = tl.load(out_ptr + n * vocab + token_id, mask=mask, other=0.0)
        z = tl.where(z > 0, z / repetition, z * repetition)
        count &= IN_PROMPT - 1
        z -= tl.where(count > 0, presence + frequency * count.to(tl.float32), 0.0)
        tl.store(out_ptr + n * vocab + token_id, z, mask=mask)


def edit_logits(
    logits: torch.Tensor, edit: EditRows, history: torch.Tensor, state: SamplingState
) -> torch.Tensor:
    """Does what `edit_logits` of layers/filters.py does."""
    m, (_, vocab), stride = len(edit.rows), logits.shape, logits.stride(0)
    out = logits.new_empty(m, vocab, dtype=torch.float32)
    grid = m, triton.cdiv(vocab, TILE)
    _copy_kernel[grid](logits, edit.index, edit.is_only, out, vocab, stride, TILE=TILE)
    _edit_kernel[(m,)](
        logits,
        edit.index,
        edit.rows,
        state.context_lens,
        edit.num_edits,
        edit.id_addresses,
        edit.bias_addresses,
        edit.min_lens,
        out,
        vocab,
        stride,
        TILE=TILE,
    )
    if edit.has_penalties:
        counts = torch.zeros_like(out, dtype=torch.int32)
        width = history.shape[1]
        _count_kernel[(m,)](
            history,
            edit.rows,
            state.context_lens,
            edit.num_prompts,
            counts,
            vocab,
            width,
            TILE=TILE,
        )
        _penalty_kernel[(m,)](
            history,
            edit.rows,
            state.context_lens,
            edit.repetition,
            edit.presence,
            edit.frequency,
            counts,
            out,
            vocab,
            width,
            TILE=TILE,
        )
    return out
