"""What the runner keeps for each resident sequence, on the model's device.

The scheduler names rows. A step derives its inputs from the state of its rows and leaves its
result there. So a decode step needs nothing from the host but the list of rows and, now and then,
new block ids. All updates happen in launch order, on one stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.batch import BlockGrowth, RowInit, ScheduledBatch
from nanovllm.engine.staging import HostToDevice
from nanovllm.utils.context import Context
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.sampling_state import SamplingState


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arguments of the model's forward: ids int64 [t], positions int64 [t], and metadata."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    context: Context


class RowState:
    """The rows of up to `max_num_seqs` residents: block tables and what they sample with."""

    def __init__(self, config: Config, group: TPGroup) -> None:
        max_num_seqs, device = config.max_num_seqs, config.torch_device
        self.block_size = config.kvcache_block_size
        self._to_device = HostToDevice(device, group)
        self.sampling = SamplingState.zeros(max_num_seqs, device)
        self.block_tables = torch.zeros(
            max_num_seqs, config.max_blocks_per_seq, dtype=torch.int32, device=device
        )

    def prefill_inputs(
        self, batch: ScheduledBatch
    ) -> tuple[StepInputs, torch.Tensor, torch.Tensor]:
        """Starts the batch's new rows and advances its rows' lengths by this step's tokens.

        Returns the step's inputs; the indices int64 [m] of the tokens after which one is sampled;
        and the rows int64 [m] that get the sampled tokens.
        """
        inits = {r: c.init for r, c in zip(batch.rows, batch.chunks, strict=True) if c.init}
        if inits:
            self._start_rows(list(inits), list(inits.values()))
        starts = np.array([chunk.start for chunk in batch.chunks])
        lens = np.array([len(chunk.token_ids) for chunk in batch.chunks])
        ends = starts + lens
        cu_q = np.concatenate(([0], lens.cumsum()))
        is_last = np.array([chunk.is_last for chunk in batch.chunks])
        input_ids, positions, token_rows, rows, context_lens, cu_seqlens_q, last, sampled_rows = (
            self._to_device.send(
                np.concatenate([chunk.token_ids for chunk in batch.chunks]),
                np.arange(cu_q[-1]) + np.repeat(starts - cu_q[:-1], lens),
                np.repeat(batch.rows, lens),
                np.array(batch.rows),
                ends,
                cu_q,
                cu_q[1:][is_last] - 1,
                np.array(batch.rows)[is_last],
            )
        )
        self.sampling.context_lens[rows] = context_lens
        context_lens = context_lens.to(torch.int32)
        context = Context(
            slot_mapping=self._slots(token_rows, positions),
            context_lens=context_lens,
            block_tables=self._tables(rows, batch.max_context_len) if starts.any() else None,
            max_seqlen_k=batch.max_context_len,
            cu_seqlens_q=cu_seqlens_q.to(torch.int32),
            cu_seqlens_k=torch.nn.functional.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=int(lens.max()),
        )
        return StepInputs(input_ids, positions, context), last, sampled_rows

    def grow(self, growth: Sequence[BlockGrowth]) -> None:
        """Writes new blocks into the block tables."""
        if growth:
            news = np.array([(g.row, g.index, g.block_id) for g in growth])
            row, index, block_id = self._to_device.send(*news.T)
            self.block_tables[row, index] = block_id.to(torch.int32)

    def send_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Sends row indices to the device, int64 [n]."""
        return self._to_device.send(np.array(rows))[0]

    def decode_inputs(self, rows: torch.Tensor, max_context_len: int) -> StepInputs:
        """Returns the inputs of a step that computes the last token of each row.

        It advances the rows' lengths by one. rows: int64 [n], -1 for padding, on CUDA only.
        max_context_len: a bound on the context lengths, these tokens included.
        """
        state = self.sampling
        if rows.is_cuda:
            from nanovllm.kernels.decode_inputs import decode_inputs

            input_ids, positions, slots, context_lens, tables = decode_inputs(
                rows, state.last_tokens, state.context_lens, self.block_tables, self.block_size
            )
        else:
            input_ids, positions = state.last_tokens[rows], state.context_lens[rows]
            slots, tables = self._slots(rows, positions), self._tables(rows, max_context_len)
            state.context_lens[rows] = positions + 1
            context_lens = (positions + 1).to(torch.int32)
        context = Context(
            slot_mapping=slots,
            context_lens=context_lens,
            block_tables=tables,
            max_seqlen_k=max_context_len,
        )
        return StepInputs(input_ids, positions, context)

    def _start_rows(self, rows: list[int], inits: list[RowInit]) -> None:
        width = max(len(init.block_table) for init in inits)
        tables = np.zeros((len(inits), width), dtype=np.int64)
        for i, init in enumerate(inits):
            tables[i, : len(init.block_table)] = init.block_table
        columns = self.sampling.columns(
            [init.sampling_params for init in inits], [init.seed for init in inits]
        )
        index, table, *columns_on_device = self._to_device.send(
            np.array(rows), tables.ravel(), *columns
        )
        self.sampling.start(index, *columns_on_device)
        self.block_tables[index, :width] = table.view(len(inits), width).to(torch.int32)

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        block_ids = self.block_tables[rows, positions // self.block_size].to(torch.int64)
        return block_ids * self.block_size + positions % self.block_size

    def _tables(self, rows: torch.Tensor, max_context_len: int) -> torch.Tensor:
        return self.block_tables[rows, : -(-max_context_len // self.block_size)]
