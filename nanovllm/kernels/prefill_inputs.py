"""A prefill's inputs, derived on the GPU from what the host sends and the runner's per-row state.

One launch does it, so that a CUDA graph can hold it, whatever the prompts of the step.
"""

import torch
import triton
import triton.language as tl

TOKENS = 128  # at a time
PART = 1024  # tokens of one program


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _prefill_inputs_kernel(
    rows_ptr,
    starts_ptr,
    cu_q_ptr,
    cu_k_ptr,
    is_stored_ptr,
    row_context_lens_ptr,
    row_tables_ptr,  # int32 [max rows, width]
    positions_ptr,
    slots_ptr,
    context_lens_ptr,
    cu_q_out_ptr,
    cu_k_out_ptr,
    tables_ptr,  # int32 [num_seqs, width]
    num_seqs,
    num_tokens,
    width,
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    seq = tl.program_id(0)  # one more than there are: the tokens that belong to none
    part = tl.program_id(1)
    is_seq = seq < num_seqs
    row = tl.load(rows_ptr + seq, mask=is_seq, other=-1)
    start = tl.load(starts_ptr + seq, mask=is_seq, other=0)
    is_stored = tl.load(is_stored_ptr + seq, mask=is_seq, other=0)
    first = tl.load(cu_q_ptr + seq).to(tl.int32)
    end = tl.load(cu_q_ptr + seq + 1, mask=is_seq, other=num_tokens).to(tl.int32)
    table_ptr = row_tables_ptr + row * width
    part_end = tl.minimum(first + (part + 1) * PART, end)
    table_end = tl.where(row >= 0, part_end, first)  # padding has no table
    for token in range(first + part * PART, part_end, TOKENS):
        t = token + tl.arange(0, TOKENS)
        mask = t < part_end
        position = tl.where(row >= 0, start + (t - first), 0)
        block_ptr = table_ptr + position // BLOCK_SIZE
        block_id = tl.load(block_ptr, mask=t < table_end, other=0).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(positions_ptr + t, position, mask=mask)
        tl.store(slots_ptr + t, tl.where((row >= 0) & (is_stored != 0), slot, -1), mask=mask)
    if part == 0:
        tl.store(cu_q_out_ptr + seq, first)
        tl.store(cu_k_out_ptr + seq, tl.load(cu_k_ptr + seq).to(tl.int32))
        context_len = tl.where(row >= 0, start + (end - first), 0)
        tl.store(context_lens_ptr + seq, context_len.to(tl.int32), mask=is_seq)
        tl.store(row_context_lens_ptr + row, context_len, mask=row >= 0)
        for col_start in range(0, tl.cdiv(context_len, BLOCK_SIZE), WIDTH):
            col = col_start + tl.arange(0, WIDTH)
            mask = col < width
            out_ptr = tables_ptr + seq.to(tl.int64) * width + col
            tl.store(out_ptr, tl.load(table_ptr + col, mask=mask), mask=mask)


def prefill_inputs(
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    is_stored: torch.Tensor,
    row_context_lens: torch.Tensor,
    row_tables: torch.Tensor,
    *,
    block_size: int,
    num_tokens: int,
    max_seqlen_q: int,
) -> tuple[torch.Tensor, ...]:
    """Makes the inputs of a prefill of t tokens, and sets the context lengths of its rows.

    rows, starts, is_stored: int64 [n], each sequence's row, -1 for padding; the position of its
        first new token; whether their K/V is stored.
    cu_seqlens_q, cu_seqlens_k: int64 [n + 1], cumulative new and total tokens.
    row_context_lens, row_tables: per-row state, int64 [max rows] and int32 [max rows, width].
    num_tokens: t; those behind the last sequence's are padding.
    max_seqlen_q: a bound on a sequence's new tokens, and on the tokens of padding.

    Returns positions and slots int64 [t], context lengths int32 [n], cumulative new and total
    tokens int32 [n + 1], and block tables int32 [n, width], of which only the blocks within the
    context length are written. Padding gets position 0 and slot -1.
    """
    num_seqs, width = len(rows), row_tables.shape[1]
    new_empty = rows.new_empty
    positions, slots = new_empty(num_tokens), new_empty(num_tokens)
    context_lens = new_empty(num_seqs, dtype=torch.int32)
    cu_q, cu_k = (new_empty(num_seqs + 1, dtype=torch.int32) for _ in range(2))
    tables = new_empty(num_seqs, width, dtype=torch.int32)
    _prefill_inputs_kernel[(num_seqs + 1, triton.cdiv(max_seqlen_q, PART))](
        rows,
        starts,
        cu_seqlens_q,
        cu_seqlens_k,
        is_stored,
        row_context_lens,
        row_tables,
        positions,
        slots,
        context_lens,
        cu_q,
        cu_k,
        tables,
        num_seqs,
        num_tokens,
        width,
        BLOCK_SIZE=block_size,
        PART=PART,
        TOKENS=TOKENS,
        WIDTH=32,
        num_warps=1,
    )
    return positions, slots, context_lens, cu_q, cu_k, tables
