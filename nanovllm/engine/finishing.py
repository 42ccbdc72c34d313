"""Why a sequence ends: a stop string, a stop token, or its length."""

from collections.abc import Collection

from nanovllm.engine.completion_text import CompletionText
from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.sequence import Sequence


class Finisher:
    """Looks at each new token of each sequence; only those with stop strings need its text.

    eos_token_ids: the ids that end a sequence unless it ignores them.
    decoder: None without a tokenizer; then no sequence may have stop strings.
    """

    def __init__(self, eos_token_ids: Collection[int], decoder: TextDecoder | None) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decoder = decoder

    def ends(self, seq: Sequence, token_id: int) -> bool:
        """Sets the finish reason if this token, its last one, ends `seq`; returns whether it does.

        A stop string comes first, so that no text holds one but at its end.
        """
        params = seq.sampling_params
        can_stop = len(seq.token_ids) - seq.num_prompt_tokens >= params.min_tokens
        if params.stop and (stop := self._completed_stop_string(seq)) is not None:
            seq.stop_reason = stop
            seq.finish_reason = "stop"
        elif can_stop and not params.ignore_eos and token_id in self.eos_token_ids:
            seq.finish_reason = "stop"
        elif can_stop and params.stop_token_ids and token_id in params.stop_token_ids:
            seq.stop_reason = token_id
            seq.finish_reason = "stop"
        elif len(seq.token_ids) >= seq.max_num_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def _completed_stop_string(self, seq: Sequence) -> str | None:
        """Returns the stop string that the last token completes, if any."""
        params = seq.sampling_params
        if seq.text is None:
            assert self.decoder is not None, "stop strings are refused without a tokenizer"
            seq.text = CompletionText.of(self.decoder, params)
        found = None
        for token_id in seq.token_ids[seq.num_prompt_tokens + seq.text.num_tokens :]:
            is_counted = seq.text.num_tokens + 1 >= params.min_tokens
            found = seq.text.push(token_id, is_counted)
        return found
