"""The residents that want more than plain sampling: what they want, and what it takes of a step.

Plain rows leave nothing here, so a batch of them costs one look at an empty dict. What a step needs
on the device is sent when the rows of a batch change, and used until they change again.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.batch import PrefillPart, RowHistory, RowInit
from nanovllm.engine.logprobs import Report
from nanovllm.engine.staging import HostToDevice
from nanovllm.layers.special_sampler import SpecialSampler
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.sampling_state import SamplingState
from nanovllm.utils.special_rows import EditRows, FilterRows, LogitEdits

PROMPT_TOKENS_AT_A_TIME = 256
EDITED_AT_A_TIME = 64  # rows: each takes 8 bytes for each id of the vocabulary


@dataclass(frozen=True, slots=True)
class _Special:
    """What a row wants: its parameters, tokens, and edits if it has any."""

    params: SamplingParams
    history: RowHistory
    edits: LogitEdits | None


_Placed = tuple[int, int, _Special]  # its place in the batch, its row


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens of a sequence that follow tokens of a step.

    first: the place, among the step's tokens, of the one that the first of them follows.
    """

    seq_id: int
    first: int
    token_ids: "array[int]"
    num_top: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a batch wants.

    groups: how special rows are drawn, with the edits of their logits, if any. Their filters count
        rows among the edited logits, or else in the batch.
    reported: int64, the rows of the batch that are reported; `owners` are the same on the host,
        and `num_tops` says how many of the most likely ids each wants.
    """

    groups: list[tuple[FilterRows, EditRows | None]]
    reported: Tensor
    owners: list[int]
    num_tops: list[int]


class SpecialRows:
    """Keeps what the rows of residents want, and draws and reports for those of a step.

    history: as in `SpecialSampler`.
    """

    def __init__(
        self, config: Config, group: TPGroup, state: SamplingState, to_device: HostToDevice
    ) -> None:
        shape = config.max_num_seqs, config.max_model_len + 1  # warm-up fills rows to the brim
        self._history = torch.zeros(shape, dtype=torch.int32, device=config.torch_device)
        self._vocab_size: int = config.hf_config.vocab_size
        self._sampler = SpecialSampler(group, self._vocab_size, state, self._history)
        self._to_device = to_device
        self._special: dict[int, _Special] = {}
        self._edits: WeakValueDictionary[object, LogitEdits] = WeakValueDictionary()
        self._planned: tuple[list[int], _Plan | None] | None = None  # rows of a batch, their plan

    def kernel_calls(self, dtype: torch.dtype) -> list[Callable[[], object]]:
        """Returns calls that between them need all kernels, and the memory of a group of rows.

        They draw for row 0, which no request has yet.
        """
        params = SamplingParams(top_k=1, top_p=0.5, min_p=0.5, presence_penalty=1)
        history = RowHistory(1, array("q"), frozenset())
        special = _Special(params, history, self._shared_edits(params, history))
        group = [(0, 0, special)] * EDITED_AT_A_TIME
        filters, edit = self._filters(group, [0] * len(group)), self._edit_rows(group)
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=filters.index.device)
        draw, index = self._sampler.draw, filters.index
        return [
            partial(draw, logits, filters),
            partial(draw, logits, filters, edit),
            partial(self._sampler.top_logprobs, logits, index, filters.rows, 1),
        ]

    def start(self, inits: dict[int, RowInit]) -> None:
        """Starts the rows of new sequences."""
        for row, init in inits.items():
            if init.history is None:
                if self._special.pop(row, None) is not None:
                    self._planned = None
                continue
            self._planned = None
            params, history = init.sampling_params, init.history
            edits = self._shared_edits(params, history) if params.edits_logits else None
            self._special[row] = _Special(params, history, edits)
            if params.has_penalties:
                (tokens,) = self._to_device.send(np.array(history.token_ids))
                self._history[row, : len(tokens)] = tokens.int()

    def draw(
        self, logits: Tensor, token_ids: Tensor, rows: list[int], seq_ids: list[int]
    ) -> Report | None:
        """Draws again for the special ones of `rows`, and reports on those that want it.

        logits [n, share], token_ids int64 [n]: of the step, of which `rows` are the leading ones;
            the ids of special rows are replaced.
        seq_ids: whose rows they are.
        """
        plan = self._plan(rows) if self._special else None
        if plan is None:
            return None
        whole = self._sampler.whole(logits)
        for filters, edit in plan.groups:
            token_ids[filters.index if edit is None else edit.index] = self._sampler.draw(
                whole, filters, edit
            )
        if not plan.owners:
            return None
        own = token_ids[plan.reported].clamp(min=0)  # -1 where none could be drawn
        top = self._sampler.top_logprobs(whole, plan.reported, own, max(plan.num_tops))
        owners = [(seq_ids[i], 1, k) for i, k in zip(plan.owners, plan.num_tops, strict=True)]
        return Report(top, owners)

    def prompt_targets(self, part: PrefillPart) -> list[PromptTargets]:
        """Returns for each sequence whose prompt is reported what follows the tokens of its chunk;
        none most of the time."""
        targets: list[PromptTargets] = []
        if not self._special:
            return targets
        first = 0
        for seq_id, row, chunk in zip(part.seq_ids, part.rows, part.chunks, strict=True):
            special = self._special.get(row)
            if special is not None and special.params.prompt_logprobs is not None:
                end = min(chunk.start + len(chunk.token_ids) + 1, special.history.num_prompt_tokens)
                ids = special.history.token_ids[chunk.start + 1 : end]
                if ids:
                    num_top = special.params.prompt_logprobs
                    targets.append(PromptTargets(seq_id, first, ids, num_top))
            first += len(chunk.token_ids)
        return targets

    def report_prompts(
        self,
        targets: Sequence[PromptTargets],
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> Iterator[Report]:
        """Reports on prompts, by pieces, so that few logits exist at a time.

        hidden [t, hidden_size]: of all tokens of the step.
        """
        for target in targets:
            (ids,) = self._to_device.send(np.array(target.token_ids))
            states = hidden[target.first : target.first + len(ids)]
            pieces = zip(
                ids.split(PROMPT_TOKENS_AT_A_TIME),
                states.split(PROMPT_TOKENS_AT_A_TIME),
                strict=True,
            )
            for piece, piece_states in pieces:
                whole = self._sampler.whole(compute_logits(piece_states))
                index = torch.arange(len(piece), device=piece.device)
                top = self._sampler.top_logprobs(whole, index, piece, target.num_top)
                yield Report(top, [(target.seq_id, len(piece), target.num_top)])

    def _plan(self, rows: list[int]) -> _Plan | None:
        """Returns what these rows want, None if all are plain; the same object while they stay."""
        if self._planned is None or self._planned[0] != rows:
            special = [
                (i, row, self._special[row]) for i, row in enumerate(rows) if row in self._special
            ]
            self._planned = rows, self._made_plan(special) if special else None
        return self._planned[1]

    def _made_plan(self, special: Sequence[_Placed]) -> _Plan:
        groups: list[tuple[FilterRows, EditRows | None]] = []
        filtered = [s for s in special if s[2].edits is None and s[2].params.is_filtered]
        if filtered:
            groups.append((self._filters(filtered, [i for i, _, _ in filtered]), None))
        edited = [s for s in special if s[2].edits is not None]
        for start in range(0, len(edited), EDITED_AT_A_TIME):
            group = edited[start : start + EDITED_AT_A_TIME]
            groups.append((self._filters(group, range(len(group))), self._edit_rows(group)))
        reported = [(i, s.params.logprobs) for i, _, s in special if s.params.logprobs is not None]
        owners = [i for i, _ in reported]
        (on_device,) = self._to_device.send(np.array(owners, dtype=np.int64))
        return _Plan(groups, on_device, owners, [k for _, k in reported])

    def _filters(self, special: Sequence[_Placed], index: Sequence[int]) -> FilterRows:
        rows, params = [row for _, row, _ in special], [s.params for _, _, s in special]
        return FilterRows(*self._to_device.send(*FilterRows.columns(index, rows, params)))

    def _edit_rows(self, special: Sequence[_Placed]) -> EditRows:
        params = [s.params for _, _, s in special]
        edits = [s.edits for _, _, s in special if s.edits is not None]
        columns = EditRows.columns(
            [i for i, _, _ in special],
            [row for _, row, _ in special],
            params,
            edits,
            [s.history.num_prompt_tokens for _, _, s in special],
        )
        has_penalties = any(p.has_penalties for p in params)
        return EditRows(edits, has_penalties, *self._to_device.send(*columns))

    def _shared_edits(self, params: SamplingParams, history: RowHistory) -> LogitEdits:
        """Returns the edits of a request on the device, shared by requests that want the same."""
        biases = tuple((params.logit_bias or {}).items())
        key = params.allowed_token_ids, biases, history.late_ids
        edits = self._edits.get(key)
        if edits is None:
            columns = LogitEdits.columns(params, history.late_ids, self._vocab_size)
            is_only = params.allowed_token_ids is not None
            edits = self._edits[key] = LogitEdits(is_only, *self._to_device.send(*columns))
        return edits
