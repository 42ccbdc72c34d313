"""The request lifecycle and the step loop: check, schedule, launch, complete."""

from array import array
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch, StepHandle
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.executor import TensorParallelExecutor
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.tokenizer import load_tokenizer, stop_token_ids
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.distributed import TPGroup

Prompt = str | list[int]
Runner = ModelRunner | TensorParallelExecutor


class LLMEngine:
    """Serves requests on one model. Its keywords are the fields of `Config`."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.config = Config.from_kwargs(model, **kwargs)
        self.tokenizer = load_tokenizer(self.config.model)
        self._runner: Runner | None = make_runner(self.config)
        self.scheduler = Scheduler(
            BlockManager(
                self._runner.num_blocks,
                self.config.kvcache_block_size,
                self.config.enable_prefix_caching,
            ),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            stop_token_ids=stop_token_ids(self.config.model, self.config.hf_config, self.tokenizer),
            finds_prefix_groups=self._runner.reads_prefixes_once,
        )
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle]] = deque()  # launched, not read
        self._num_requests = 0
        self._unreported: list[Sequence] = []  # ended, but not yet returned by step()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queues one request and returns its id.

        Raises `TypeError` or `ValueError` if the request cannot be served.
        """
        self._check_open()
        check_sampling_params(sampling_params, "sampling_params")
        return self._enqueue(self._checked_token_ids(prompt, "prompt"), sampling_params)

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launches one step and completes the one before it, or with `async_scheduling` off itself.

        Returns the requests that ended in the completed step, as (id, completion token ids), and a
        count: the prompt tokens that the step computed, or if it computed none minus the sequences
        that it decoded. It returns ([], 0) if there is no step to complete, as in the first call.
        """
        finished, batch = self._step()
        finished = self._unreported + finished
        self._unreported = []
        num_tokens = batch.num_prefilled or -batch.num_decoded if batch else 0
        return [(seq.seq_id, seq.completion_token_ids) for seq in finished], num_tokens

    def is_finished(self) -> bool:
        """Whether every request has ended and been returned by `step`."""
        return self.scheduler.is_finished() and not self._unreported

    def exit(self) -> None:
        """Drops all requests and frees model and cache. A second call does nothing.

        Any other method raises `RuntimeError` afterwards.
        """
        self.scheduler.abort_all()
        self._in_flight.clear()
        self._unreported.clear()
        if self._runner is not None:
            self._runner.exit()
            self._runner = None

    def _step(self) -> tuple[list[Sequence], ScheduledBatch | None]:
        """Does what `step` says; returns the sequences that ended, and the completed step if any.

        If anything raises, the steps in flight are forgotten and all residents start afresh.
        """
        runner = self._check_open()
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self._in_flight.append((batch, runner.launch(batch)))
            # One step stays in flight, unless nothing new could be launched.
            may_wait = batch is not None and self.config.async_scheduling
            if not self._in_flight or (may_wait and len(self._in_flight) == 1):
                return [], None
            completed, handle = self._in_flight.popleft()
            finished = self.scheduler.postprocess(completed, handle.token_ids(), handle.logprobs())
        except BaseException:
            self._in_flight.clear()
            self.scheduler.recover()
            raise
        self._forget_idle_steps()
        return finished, completed

    def _abort(self, seq_ids: list[int]) -> None:
        """Drops requests, except those that have ended."""
        self.scheduler.abort(seq_ids)
        self._forget_idle_steps()

    def _forget_idle_steps(self) -> None:
        """Forgets the step in flight once no request is left: nobody needs its ids."""
        if self.scheduler.is_finished():
            self._in_flight.clear()
            self.scheduler.forget_steps_in_flight()

    def _enqueue(self, token_ids: "array[int]", sampling_params: SamplingParams) -> int:
        seq_id = self._num_requests
        self._num_requests += 1
        seq = Sequence(
            seq_id,
            token_ids,
            sampling_params,
            max_model_len=self.config.max_model_len,
            seed=request_seed(sampling_params.seed, self.config.seed, seq_id),
        )
        self.scheduler.add(seq)
        return seq_id

    def _checked_token_ids(self, prompt: Prompt, what: str) -> "array[int]":
        """Returns the prompt as an array of token ids; errors about it call it `what`."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"{what} is text, but {self.config.model} has no tokenizer; pass token ids"
                )
            token_ids: list[int] = self.tokenizer.encode(prompt)
        elif not isinstance(prompt, list):
            raise TypeError(f"{what} must be a str or a list of token ids, got {prompt!r}")
        else:
            token_ids = prompt
        if not token_ids:
            raise ValueError(f"{what} is empty; it needs at least one token")
        if len(token_ids) >= self.config.max_model_len:
            raise ValueError(
                f"{what} has {len(token_ids)} tokens, which leaves no room for a completion within "
                f"max_model_len={self.config.max_model_len}; shorten it or raise max_model_len"
            )
        return self._copied_ids(token_ids, what)

    def _copied_ids(self, token_ids: list[int], what: str) -> "array[int]":
        vocab_size = self.config.hf_config.vocab_size
        if set(map(type, token_ids)) == {int}:  # C speed: most prompts need no loop
            with suppress(OverflowError):  # the loop names the id
                copied = array("q", token_ids)
                if np.frombuffer(copied, np.uint64).max() < vocab_size:  # negative ids are large
                    return copied
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TypeError(f"{what} has {token_id!r} at index {index}; token ids are ints")
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{what} has token id {token_id} at index {index}; the model's vocabulary "
                    f"has ids 0 to {vocab_size - 1}"
                )
        return array("q", token_ids)

    def _check_open(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("this engine has been closed by exit(); make a new LLM")
        return self._runner


def make_runner(config: Config) -> Runner:
    """Makes what computes: one rank in this process, or several in processes of their own."""
    if config.tensor_parallel_size == 1:
        return ModelRunner(config, TPGroup())
    return TensorParallelExecutor(config)


def check_sampling_params(value: object, what: str) -> None:
    if not isinstance(value, SamplingParams):
        raise TypeError(f"{what} must be a SamplingParams, got {value!r}")


def request_seed(own: int | None, engine_seed: int, number: int) -> int:
    """Returns 64 bits that key a request's sampling noise.

    They depend on the request's own seed, or without one on the engine's and the request's number.
    """
    parts = [engine_seed, number] if own is None else [own]
    return xxhash.xxh64_intdigest(b"".join(part.to_bytes(8, "little") for part in parts))
