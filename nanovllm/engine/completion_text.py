"""The text of one completion while it grows, and the stop strings in it."""

from threading import Lock

from nanovllm.engine.detokenizer import Detokenizer, TextDecoder
from nanovllm.sampling_params import SamplingParams


class CompletionText:
    """Takes ids one by one, looks for stop strings, and gives out text that nothing later changes.

    It gives out no text that may turn out to be the start of a stop string. The cost of an id does
    not grow with the completion. One thread may push while another one takes.

    stop: the stop strings.
    includes_stop: the text ends after the stop string, not before it.
    num_tokens: how many ids it has taken.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), includes_stop: bool = False
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._stop = stop
        self._includes_stop = includes_stop
        self._reach = max(map(len, stop), default=0)
        self._pieces: list[str] = []  # final text that has not been given out
        self._tail = ""  # the last `_reach` characters of the final text
        self._tentative = ""  # what followed it when the last id came
        self._is_cut = False
        self.num_given = 0  # characters
        self._num_repeated = 0  # characters at its start that have been given out already
        self._lock = Lock()

    @classmethod
    def of(cls, decoder: TextDecoder, params: SamplingParams) -> "CompletionText":
        """Returns the empty text of a completion with these parameters."""
        detokenizer = decoder.detokenizer(params.skip_special_tokens)
        return cls(detokenizer, tuple(params.stop or ()), params.include_stop_str_in_output)

    def push(self, token_id: int, is_counted: bool = True) -> str | None:
        """Takes the next id; returns the stop string that it has completed, if any.

        Of several it is the one that begins first, then the first in the list. If not `is_counted`,
        what this id completes never counts.
        """
        with self._lock:
            return self._push(token_id, is_counted)

    def _push(self, token_id: int, is_counted: bool) -> str | None:
        self.num_tokens += 1
        piece = self._detokenizer.push(token_id)
        if piece:
            self._pieces.append(piece)
        if not self._stop:
            return None
        tentative = self._detokenizer.tentative()
        window = self._tail + piece + tentative
        num_old = len(self._tail)
        if window.startswith(self._tentative, num_old):
            num_old += len(self._tentative)
        self._tail = (self._tail + piece)[-self._reach :]
        self._tentative = tentative
        found = self._find(window, num_old) if is_counted else None
        if found is None:
            return None
        start, stop = found
        text = "".join(self._pieces) + tentative
        num_dropped = len(window) - start - len(stop) * self._includes_stop
        self._pieces = [text[: len(text) - num_dropped]]
        self._is_cut = True
        return stop

    def take(self) -> str:
        """Returns the text that has become certain since the last call."""
        with self._lock:
            text = "".join(self._pieces)
            num_certain = len(text) - self._num_held(text)
            if num_certain < self._num_repeated:
                return ""
            taken = text[self._num_repeated : num_certain]
            self._pieces, self._num_repeated = [text[num_certain:]], 0
            self.num_given += len(taken)
            return taken

    def finish(self) -> str:
        """Returns what has not been given out of the whole text, once no more ids come."""
        with self._lock:
            text = "".join(self._pieces)[self._num_repeated :]
            return text if self._is_cut else text + self._detokenizer.rest()

    def go_on_from(self, other: "CompletionText") -> None:
        """Gives out only what follows the text that `other`, which had the same ids, has given."""
        self.num_given = self._num_repeated = other.num_given

    def _find(self, window: str, num_old: int) -> tuple[int, str] | None:
        """Returns start and text of the stop string that ends behind the first `num_old`
        characters."""
        found = []
        for order, stop in enumerate(self._stop):
            start = window.find(stop, max(num_old - len(stop) + 1, 0))
            if start >= 0:
                found.append((start, order))
        if not found:
            return None
        start, order = min(found)
        return start, self._stop[order]

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` with which a stop string may begin."""
        for size in range(min(self._reach - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stop):
                return size
        return 0
