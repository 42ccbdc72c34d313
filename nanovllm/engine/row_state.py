"""What the runner keeps per resident sequence, on the model's device.

The scheduler names rows; the state here is what a step derives its inputs from, and where it leaves
its result, so that the next decode step needs nothing but the list of rows. All updates happen in
launch order.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.batch import RowInit, ScheduledBatch
from nanovllm.utils.context import Context


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step of t tokens in n rows.

    logits_indices: int64 [m], which of the t tokens are followed by a sampled one.
    sampled_rows: int64 [m], the rows that get those.
    """

    input_ids: torch.Tensor  # int64 [t]
    positions: torch.Tensor  # int64 [t]
    context: Context
    logits_indices: torch.Tensor
    sampled_rows: torch.Tensor


class RowState:
    """Per-row state of up to `max_num_seqs` residents with up to `max_num_blocks` blocks each."""

    def __init__(
        self, max_num_seqs: int, max_num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.device = device
        # Tokens in the cache, and the one that follows them.
        self.context_lens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.block_tables = torch.zeros(
            max_num_seqs, max_num_blocks, dtype=torch.int32, device=device
        )

    def prepare(self, batch: ScheduledBatch) -> StepInputs:
        """Applies the batch's news to the rows and derives the step's inputs from them."""
        return self._prepare_prefill(batch) if batch.is_prefill else self._prepare_decode(batch)

    def finish(self, inputs: StepInputs, sampled: torch.Tensor) -> None:
        """The sampled ids, int64 [m], become the last tokens of their rows."""
        self.last_tokens[inputs.sampled_rows] = sampled

    def _prepare_prefill(self, batch: ScheduledBatch) -> StepInputs:
        for row, chunk in zip(batch.rows, batch.chunks, strict=True):
            if chunk.init is not None:
                self._start_row(row, chunk.init)
        starts = np.array([chunk.start for chunk in batch.chunks])
        lens = np.array([len(chunk.token_ids) for chunk in batch.chunks])
        ends = starts + lens
        cu_q = np.concatenate(([0], lens.cumsum()))
        cu_k = np.concatenate(([0], ends.cumsum()))
        is_last = np.array([chunk.is_last for chunk in batch.chunks])
        positions = np.arange(cu_q[-1]) + np.repeat(starts - cu_q[:-1], lens)
        input_ids = np.concatenate([chunk.token_ids for chunk in batch.chunks])

        rows = self._to_device(np.array(batch.rows))
        self.context_lens[rows] = self._to_device(ends)
        token_rows = self._to_device(np.repeat(batch.rows, lens))
        device_positions = self._to_device(positions)
        has_prefix = bool(starts.any())
        context = Context(
            slot_mapping=self._slots(token_rows, device_positions),
            context_lens=self._to_device(ends.astype(np.int32)),
            block_tables=self._tables(rows, batch.max_context_len) if has_prefix else None,
            max_seqlen_k=batch.max_context_len,
            cu_seqlens_q=self._to_device(cu_q.astype(np.int32)),
            cu_seqlens_k=self._to_device(cu_k.astype(np.int32)),
            max_seqlen_q=int(lens.max()),
        )
        return StepInputs(
            input_ids=self._to_device(input_ids),
            positions=device_positions,
            context=context,
            logits_indices=self._to_device(cu_q[1:][is_last] - 1),
            sampled_rows=self._to_device(np.array(batch.rows)[is_last]),
        )

    def _prepare_decode(self, batch: ScheduledBatch) -> StepInputs:
        if batch.growth:
            news = np.array([(g.row, g.index, g.block_id) for g in batch.growth])
            row, index, block_id = self._to_device(news.T)
            self.block_tables[row, index] = block_id.to(torch.int32)
        rows = self._to_device(np.array(batch.rows))
        positions = self.context_lens[rows]
        self.context_lens[rows] = positions + 1
        context = Context(
            slot_mapping=self._slots(rows, positions),
            context_lens=(positions + 1).to(torch.int32),
            block_tables=self._tables(rows, batch.max_context_len),
            max_seqlen_k=batch.max_context_len,
        )
        return StepInputs(
            input_ids=self.last_tokens[rows],
            positions=positions,
            context=context,
            logits_indices=torch.arange(len(batch.rows), device=self.device),
            sampled_rows=rows,
        )

    def _start_row(self, row: int, init: RowInit) -> None:
        self.temperatures[row] = init.temperature
        self.seeds[row] = init.seed - (init.seed >> 63 << 64)  # the same 64 bits, signed
        self.block_tables[row, : len(init.block_table)] = torch.tensor(
            init.block_table, dtype=torch.int32
        )

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        block_ids = self.block_tables[rows, positions // self.block_size].to(torch.int64)
        return block_ids * self.block_size + positions % self.block_size

    def _tables(self, rows: torch.Tensor, max_context_len: int) -> torch.Tensor:
        return self.block_tables[rows, : -(-max_context_len // self.block_size)]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
