"""Samples the rows that want more than plain sampling, after the sampler has drawn for all rows.

They replace what was drawn for them. With several ranks each gathers their logits, and computes the
same as the others.
"""

from torch import Tensor

from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.sampling_state import SamplingState
from nanovllm.utils.special_rows import EditRows, FilterRows, TopLogprobs


class SpecialSampler:
    """Edits, filters and reports logits of the whole vocabulary.

    history: int32 [max rows, width], the tokens of each row that has penalties.
    """

    def __init__(
        self, group: TPGroup, vocab_size: int, state: SamplingState, history: Tensor
    ) -> None:
        self._group = group
        self._vocab_size = vocab_size
        self._state = state
        self._history = history

    def whole(self, logits: Tensor) -> Tensor:
        """logits of this rank's share of the vocabulary, [n, share] -> of all ids, [n, vocab]"""
        if self._group.size > 1:
            shares = self._group.all_gather(logits.contiguous())  # [ranks, n, share]
            logits = shares.transpose(0, 1).flatten(1)
        return logits[:, : self._vocab_size]

    def draw(self, logits: Tensor, filters: FilterRows, edit: EditRows | None = None) -> Tensor:
        """Draws a token for each of m rows and stores it as the row's last token.

        logits [n, vocab]; edit: changes the logits of these rows first -> ids int64 [m], -1 where
            they are NaN or infinite
        """
        if logits.is_cuda:
            from nanovllm.kernels.filters import draw_filtered
            from nanovllm.kernels.logit_edits import edit_logits
        else:
            from nanovllm.layers.filters import draw_filtered, edit_logits
        if edit is None:
            return draw_filtered(logits, filters, self._state)
        edited = edit_logits(logits, edit, self._history, self._state)
        drawn = draw_filtered(edited, filters, self._state)
        if edit.has_penalties:  # the next draw counts it, at the position that it takes
            ids = drawn.clamp(min=0).int()  # -1 where none could be drawn
            self._history[filters.rows, self._state.context_lens[filters.rows]] = ids
        return drawn

    def top_logprobs(
        self, logits: Tensor, index: Tensor, token_ids: Tensor, num_top: int
    ) -> TopLogprobs:
        """Returns log probabilities in the rows `index`, int64 [m], of logits [n, vocab].

        They are those of `token_ids`, int64 [m], and of the `num_top` most likely ids.
        """
        if logits.is_cuda:
            from nanovllm.kernels.logprobs import top_logprobs
        else:
            from nanovllm.layers.filters import top_logprobs
        return top_logprobs(logits, index, token_ids, min(num_top, self._vocab_size))
