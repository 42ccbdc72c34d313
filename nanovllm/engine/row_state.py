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
from nanovllm.engine.batch import BlockGrowth, PrefillPart
from nanovllm.engine.prefill_layout import PrefillArrays
from nanovllm.engine.staging import HostToDevice
from nanovllm.utils.context import Context, SharedPrefixes
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

    def start(self, part: PrefillPart) -> None:
        """Starts the rows of the sequences that are new in this step."""
        inits = {r: c.init for r, c in zip(part.rows, part.chunks, strict=True) if c.init}
        inits |= {fork.row: fork.init for fork in part.forks}
        if not inits:
            return
        width = max(len(init.block_table) for init in inits.values())
        tables = np.zeros((len(inits), width), dtype=np.int64)
        for table, init in zip(tables, inits.values(), strict=True):
            table[: len(init.block_table)] = init.block_table
        columns = self.sampling.columns(
            [init.sampling_params for init in inits.values()],
            [init.seed for init in inits.values()],
        )
        rows, tables_on_device, *columns_on_device = self._to_device.send(
            np.array(list(inits)), tables.ravel(), *columns
        )
        self.sampling.start(rows, *columns_on_device)
        self.block_tables[rows, :width] = tables_on_device.view(len(inits), width).to(torch.int32)
        if part.forks:
            ends = [chunk.start + len(chunk.token_ids) for chunk in part.chunks]
            pairs = np.array([(fork.row, ends[fork.chunk]) for fork in part.forks])
            forked, lens = self._to_device.send(*pairs.T)
            self.sampling.context_lens[forked] = lens

    def prefill_inputs(
        self, arrays: PrefillArrays, *, max_seqlen_q: int, max_context_len: int, is_paged: bool
    ) -> StepInputs:
        """Returns the inputs of a prefill, and sets the lengths of its rows.

        max_seqlen_q, max_context_len: bounds on the new tokens and the context of a sequence.
        is_paged: False if no sequence has a cached prefix.
        """
        if arrays.rows.is_cuda:
            from nanovllm.kernels.prefill_inputs import prefill_inputs

            positions, slots, context_lens, cu_seqlens_q, cu_seqlens_k, tables = prefill_inputs(
                arrays.rows,
                arrays.starts,
                arrays.cu_seqlens_q,
                arrays.cu_seqlens_k,
                arrays.is_stored,
                self.sampling.context_lens,
                self.block_tables,
                block_size=self.block_size,
                num_tokens=len(arrays.token_ids),
                max_seqlen_q=max_seqlen_q,
            )
        else:
            cu_q, rows = arrays.cu_seqlens_q, arrays.rows
            lens = cu_q.diff()
            seq = torch.repeat_interleave(lens)  # the sequence of each token
            positions = arrays.starts[seq] + torch.arange(len(seq)) - cu_q[seq]
            slots = self._slots(rows[seq], positions)
            slots = slots.where(arrays.is_stored[seq].bool(), -1)
            self.sampling.context_lens[rows] = arrays.starts + lens
            context_lens = (arrays.starts + lens).to(torch.int32)
            cu_seqlens_q, cu_seqlens_k = (x.to(torch.int32) for x in (cu_q, arrays.cu_seqlens_k))
            tables = self._tables(rows, max_context_len)
        context = Context(
            slot_mapping=slots,
            context_lens=context_lens,
            block_tables=tables if is_paged else None,
            max_seqlen_k=max_context_len,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
        )
        return StepInputs(arrays.token_ids, positions, context)

    def grow(self, growth: Sequence[BlockGrowth]) -> None:
        """Writes new blocks into the block tables."""
        if growth:
            news = np.array([(g.row, g.index, g.block_id) for g in growth])
            row, index, block_id = self._to_device.send(*news.T)
            self.block_tables[row, index] = block_id.to(torch.int32)

    def send(self, numbers: np.ndarray) -> torch.Tensor:
        """Sends int64 [n] to the device."""
        return self._to_device.send(numbers)[0]

    def decode_inputs(
        self, rows: torch.Tensor, max_context_len: int, prefixes: SharedPrefixes | None = None
    ) -> StepInputs:
        """Returns the inputs of a step that computes the last token of each row.

        It advances the rows' lengths by one. rows: int64 [n], -1 for padding, on CUDA only.
        max_context_len: a bound on the context lengths, these tokens included.
        prefixes: what the rows share.
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
            shared_prefixes=prefixes,
        )
        return StepInputs(input_ids, positions, context)

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        block_ids = self.block_tables[rows, positions // self.block_size].to(torch.int64)
        return block_ids * self.block_size + positions % self.block_size

    def _tables(self, rows: torch.Tensor, max_context_len: int) -> torch.Tensor:
        return self.block_tables[rows, : -(-max_context_len // self.block_size)]
