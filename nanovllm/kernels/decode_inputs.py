"""A decode step's inputs, gathered on the GPU from the runner's per-row state.

The host names the rows alone, and so need not know the tokens that the step before sampled.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _decode_inputs_kernel(
    rows_ptr,
    last_tokens_ptr,
    row_context_lens_ptr,
    row_tables_ptr,  # int32 [max rows, width]
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    context_lens_ptr,
    tables_ptr,  # int32 [n, width]
    width,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    is_row = row >= 0
    position = tl.load(row_context_lens_ptr + row, mask=is_row, other=0)
    tl.store(input_ids_ptr + n, tl.load(last_tokens_ptr + row, mask=is_row, other=0))
    tl.store(positions_ptr + n, position)
    table_ptr = row_tables_ptr + row * width
    block_id = tl.load(table_ptr + position // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
    slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots_ptr + n, tl.where(is_row, slot, -1))
    context_len = tl.where(is_row, position + 1, 0)
    tl.store(context_lens_ptr + n, context_len.to(tl.int32))
    tl.store(row_context_lens_ptr + row, context_len, mask=is_row)
    for start in range(0, tl.cdiv(context_len, BLOCK_SIZE), WIDTH):
        col = start + tl.arange(0, WIDTH)
        mask = col < width
        tl.store(tables_ptr + n * width + col, tl.load(table_ptr + col, mask=mask), mask=mask)


def decode_inputs(
    rows: torch.Tensor,
    last_tokens: torch.Tensor,
    row_context_lens: torch.Tensor,
    row_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes the inputs of a decode step, and adds one token to each row's context length.

    rows int64 [n], -1 for padding; the rest is per-row state: last_tokens and row_context_lens
    int64 [max rows], row_tables int32 [max rows, width] -> input ids, positions and slots int64
    [n], context lengths int32 [n], block tables int32 [n, width], of which only the blocks within
    the context length are written. Padding gets id 0, position 0, slot -1 and length 0.
    """
    n, width = len(rows), row_tables.shape[1]
    input_ids, positions, slots = (rows.new_empty(n) for _ in range(3))  # one buffer each: aligned
    context_lens = rows.new_empty(n, dtype=torch.int32)
    tables = rows.new_empty(n, width, dtype=torch.int32)
    _decode_inputs_kernel[(n,)](
        rows,
        last_tokens,
        row_context_lens,
        row_tables,
        input_ids,
        positions,
        slots,
        context_lens,
        tables,
        width,
        BLOCK_SIZE=block_size,
        WIDTH=32,
        num_warps=1,
    )
    return input_ids, positions, slots, context_lens, tables
