"""What stops a sequence before its length does: a stop string or a stop token."""

from collections.abc import Collection

from nanovllm.engine.completion_text import CompletionText
from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.sequence import Sequence


class StopRules:
    """Looks at new tokens of sequences; only those with stop strings are turned into text.

    eos_token_ids: the ids that end a sequence unless it ignores them.
    decoder: None without a tokenizer; then no sequence may have stop strings.
    """

    def __init__(self, eos_token_ids: Collection[int], decoder: TextDecoder | None) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decoder = decoder

    def stops(self, seq: Sequence, token_id: int) -> bool:
        """Returns whether this token, its last one, stops `seq`; it then sets the reasons.

        A stop string comes first, so that no text holds one but at its end.
        """
        params = seq.sampling_params
        can_stop = len(seq.token_ids) - seq.num_prompt_tokens >= params.min_tokens
        if params.stop and (stop := self._completed_stop_string(seq)) is not None:
            seq.stop_reason = stop
        elif can_stop and not params.ignore_eos and token_id in self.eos_token_ids:
            seq.stop_reason = None
        elif can_stop and params.stop_token_ids and token_id in params.stop_token_ids:
            seq.stop_reason = token_id
        else:
            return False
        seq.finish_reason = "stop"
        return True

    def recover(self, seq: Sequence) -> None:
        """Sets the reasons if `seq` has ended, wherever this was cut short before.

        Its text is made again: it may have been cut short in the middle of an id.
        """
        if seq.text is not None:
            assert self.decoder is not None
            text = CompletionText.of(self.decoder, seq.sampling_params)
            text.go_on_from(seq.text)
            seq.text = text
        num_sampled = len(seq.token_ids) - seq.num_prompt_tokens
        if num_sampled and not self.stops(seq, seq.token_ids[-1]):
            is_full = len(seq.token_ids) >= seq.max_num_tokens
            seq.finish_reason = "length" if is_full else None

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
