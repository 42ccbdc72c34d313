"""What a user calls: a batch of prompts goes in, ordered results come out."""

import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import Any, cast

from tqdm import tqdm

from nanovllm.engine.llm_engine import LLMEngine, Prompt, check_sampling_params
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class LLM(LLMEngine):
    """A model that is ready to generate.

    `LLM(model, **config)` takes a local checkpoint directory and the fields of `Config`. `exit()`
    frees everything, and so does leaving a `with` block.
    """

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.exit()

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt and returns the results in the order of the prompts.

        prompts: a list of texts and lists of token ids, or one of either.
        sampling_params: one object for all prompts, or a list of the same length; None takes the
            defaults.

        All prompts are checked before any is queued: `TypeError` and `ValueError` name the index of
        the prompt. If a step raises, this call's requests are aborted; the engine stays usable, but
        not with several ranks. Ctrl-C takes effect between two steps and aborts them as well.
        Requests that `add_request` queued before are served along; `step` returns their results.
        """
        self._check_open()
        batch = _as_batch(prompts)
        params = _params_for_each(sampling_params, len(batch))
        token_ids = [self._checked_token_ids(p, f"prompt {i}") for i, p in enumerate(batch)]
        seq_ids: list[int] = []
        try:
            with _deferred_interrupt() as raise_if_interrupted:
                for request in zip(token_ids, params, strict=True):
                    seq_ids.append(self._enqueue(*request))
                finished = self._run(set(seq_ids), use_tqdm, raise_if_interrupted)
        except BaseException:
            self._abort(seq_ids)
            raise
        return [finished[seq_id] for seq_id in seq_ids]

    def _run(
        self, seq_ids: set[int], use_tqdm: bool, raise_if_interrupted: Callable[[], None]
    ) -> dict[int, RequestOutput]:
        """Steps until all of `seq_ids` have ended; returns their results by id."""
        finished: dict[int, RequestOutput] = {}
        tokens: dict[str, int] = defaultdict(int)
        seconds: dict[str, float] = defaultdict(float)
        last_completion = perf_counter()
        with tqdm(total=len(seq_ids), desc="Generating", disable=not use_tqdm) as bar:
            while len(finished) < len(seq_ids):
                ended, batch = self._step()
                if batch is not None:
                    now = perf_counter()
                    counts = {"Prefill": batch.num_prefilled, "Decode": batch.num_decoded}
                    for phase, count in counts.items():
                        if count:  # a step that does both counts for both, with all its time
                            tokens[phase] += count
                            seconds[phase] += now - last_completion
                    last_completion = now
                    rates = {key: f"{tokens[key] / seconds[key]:.0f}tok/s" for key in tokens}
                    bar.set_postfix(rates, refresh=False)
                for seq in ended:
                    if seq.seq_id in seq_ids:
                        finished[seq.seq_id] = self._output(seq)  # while the device works
                        bar.update()
                    else:
                        self._unreported.append(seq)
                raise_if_interrupted()
        return finished

    def _output(self, seq: Sequence) -> RequestOutput:
        token_ids = seq.completion_token_ids
        assert seq.finish_reason is not None
        return {
            "text": "" if self.tokenizer is None else cast(str, self.tokenizer.decode(token_ids)),
            "token_ids": token_ids,
            "finish_reason": seq.finish_reason,
        }


def _as_batch(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise TypeError(f"prompts must be a list (or one str), got {prompts!r}")
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _params_for_each(given: Any, num_prompts: int) -> list[SamplingParams]:
    params: list[SamplingParams] = given
    if not isinstance(given, list):
        params = [SamplingParams() if given is None else given] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(
            f"{len(params)} sampling_params for {num_prompts} prompts; give one object, or one each"
        )
    for index, item in enumerate(params):
        check_sampling_params(item, f"sampling_params {index}")
    return params


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the yielded function is called or the block ends.

    A second Ctrl-C acts at once. Nothing is held back in other threads, which may not set signal
    handlers, nor where the signal is not handled in Python.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    is_interrupted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, previous)

    def raise_if_interrupted() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
        raise_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, previous)
