"""What has been added to completions since somebody looked last."""

from nanovllm.engine.completion_text import CompletionText
from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import StreamOutput


class StreamedCompletion:
    """One sample of a streamed request. It reads the sequence's ids as steps append to them.

    index: the index of the prompt.
    decoder: None makes no text.
    """

    def __init__(self, index: int, seq: Sequence, decoder: TextDecoder | None) -> None:
        params = seq.sampling_params
        self.has_ended = False
        self._index = index
        self._seq = seq
        self._num_read = seq.num_prompt_tokens
        self._text: CompletionText | None = None
        if decoder is not None and params.detokenize and not params.stop:
            self._text = CompletionText.of(decoder, params)

    def delta(self) -> StreamOutput | None:
        """Returns what is new; None if nothing is. The first with a finish reason is the last."""
        seq = self._seq
        # Asked first: another thread may be stepping, and the reason comes after the last id.
        self.has_ended = seq.finish_reason is not None
        new_ids = seq.token_ids[self._num_read :].tolist()
        if not new_ids and not self.has_ended:
            return None
        self._num_read += len(new_ids)
        output: StreamOutput = {
            "index": self._index,
            "text": self._new_text(new_ids),
            "token_ids": new_ids,
            "finish_reason": seq.finish_reason,
        }
        if seq.sampling_params.n > 1:
            output["sample"] = seq.sample
        return output

    def _new_text(self, new_ids: list[int]) -> str:
        if self._text is not None:
            for token_id in new_ids:
                self._text.push(token_id)
        # With stop strings, the engine has looked for these in the text.
        text = self._text or self._seq.text
        if text is None:
            return ""
        return text.finish() if self.has_ended else text.take()


class StreamedRequest:
    """All samples of a streamed request; those after the first appear once its prompt is done."""

    def __init__(self, index: int, first: Sequence, decoder: TextDecoder | None) -> None:
        self._index = index
        self._first = first
        self._decoder = decoder
        self._open = [StreamedCompletion(index, first, decoder)]
        self._has_all = first.sampling_params.n == 1

    @property
    def has_ended(self) -> bool:
        return not self._open

    def deltas(self) -> list[StreamOutput]:
        """Returns what is new of each sample."""
        if not self._has_all and self._first.others:
            others = self._first.others
            self._open += [StreamedCompletion(self._index, o, self._decoder) for o in others]
            self._has_all = True
        deltas = [delta for sample in self._open if (delta := sample.delta()) is not None]
        self._open = [sample for sample in self._open if not sample.has_ended]
        return deltas
