"""The request lifecycle and the step loop: check, schedule, launch, complete."""

import logging
from array import array
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch, StepHandle
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.checkpoint_check import check_checkpoint
from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.executor import TensorParallelExecutor
from nanovllm.engine.interrupts import deferred_interrupt
from nanovllm.engine.metrics import Metrics, MetricsRecorder
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.numerical_error import NumericalError, not_finite
from nanovllm.engine.prompts import Prompt, PromptReader
from nanovllm.engine.request_times import RequestTimer
from nanovllm.engine.results import completion_output
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.seeds import request_seed
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.tokenizer import load_tokenizer, stop_token_ids
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.given_weights import GivenWeights

logger = logging.getLogger("nanovllm")

Runner = ModelRunner | TensorParallelExecutor


class LLMEngine:
    """Serves requests on one model. Its keywords are the fields of `Config`."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        start = perf_counter()
        self.config = Config.from_kwargs(model, **kwargs)
        check_checkpoint(self.config)
        self.tokenizer = load_tokenizer(self.config.model)
        stop_ids = stop_token_ids(self.config.model, self.config.hf_config, self.tokenizer)
        self._decoder = None if self.tokenizer is None else TextDecoder(self.tokenizer)
        self._prompts = PromptReader(
            self.config.model,
            self.tokenizer,
            vocab_size=self.config.hf_config.vocab_size,
            max_model_len=self.config.max_model_len,
        )
        self._runner: Runner | None = make_runner(self.config)
        self.scheduler = Scheduler(
            BlockManager(
                self._runner.num_blocks,
                self.config.kvcache_block_size,
                self.config.enable_prefix_caching,
            ),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            stop_token_ids=stop_ids,
            finds_prefix_groups=self._runner.reads_prefixes_once,
            text_decoder=self._decoder,
        )
        timer = RequestTimer() if self.config.request_metrics else None
        self._metrics = MetricsRecorder(self.scheduler, timer)
        # Launched, not read: the step, what will have its ids, and when it was scheduled.
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle, float]] = deque()
        self._num_requests = 0
        self._num_sequences = 0
        self._unreported: list[Sequence] = []  # ended, but not yet returned by step()
        seconds = perf_counter() - start
        logger.info("%s, ready after %.1f s", self._runner.description, seconds)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queues one request and returns its id. With n > 1, sample i has the id plus i.

        Raises `TypeError` or `ValueError` if the request cannot be served.
        """
        self._check_open()
        self._check_sampling_params(sampling_params, "sampling_params")
        token_ids = self._prompts.token_ids(prompt, "prompt")
        return self._enqueue(token_ids, sampling_params, self._unreported).seq_id

    def abort(self, seq_id: int) -> None:
        """Drops a request; `step` never returns those of its samples that have not ended yet.

        seq_id: what `add_request` has returned; nothing happens if the request has ended.
        """
        if not isinstance(seq_id, int) or isinstance(seq_id, bool):
            raise TypeError(f"seq_id must be an int that add_request returned, got {seq_id!r}")
        if not 0 <= seq_id < self._num_sequences:
            raise ValueError(f"seq_id must be an id that add_request returned, got {seq_id}")
        self._abort(self.scheduler.unfinished_samples(seq_id))

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launches one step and completes the one before it, or with `async_scheduling` off itself.

        Returns the samples that ended in the completed step, as (id, completion token ids), and a
        count: the prompt tokens that the step computed, or if it computed none minus the sequences
        that it decoded. It returns ([], 0) if there is no step to complete, as in the first call.

        Raises `NumericalError` for samples that failed; the next call returns what ended with them.
        """
        batch = self._step()
        failed = {f"request {seq.seq_id}": seq for seq in self._unreported if seq.error}
        if failed:
            self._unreported[:] = [seq for seq in self._unreported if not seq.error]
            errors = {name: str(seq.error) for name, seq in failed.items()}
            outputs = [completion_output(seq, self._decoder) for seq in failed.values()]
            raise NumericalError(errors, outputs)
        ended = [(seq.seq_id, seq.completion_token_ids) for seq in self._unreported]
        self._unreported.clear()
        return ended, (batch.num_prefilled or -batch.num_decoded if batch else 0)

    def is_finished(self) -> bool:
        """Whether every request has ended and been returned by `step`."""
        return self.scheduler.is_finished() and not self._unreported

    def metrics(self) -> Metrics:
        """Returns what the engine has done since it was made, as plain numbers; `Metrics` says what
        each means."""
        return self._metrics.report()

    def reset_prefix_cache(self) -> None:
        """Forgets all K/V that later prompts could find; what runs keeps its own."""
        self._check_open()
        self.scheduler.block_manager.reset()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | str | Path) -> None:
        """Replaces all weights in place, on all ranks, and resets the prefix cache.

        weights: (name, tensor) pairs with the names and shapes of the checkpoint's tensors, of any
            floating dtype and on any device; or a checkpoint directory.

        Raises `ValueError` or `TypeError`, and leaves the old weights in use, if a name, a shape or
        a dtype is wrong; `RuntimeError` while requests run.
        """
        runner = self._check_open()
        if not self.scheduler.is_finished():
            raise RuntimeError(
                f"{len(self.scheduler.unfinished)} requests still run on the old weights; let them "
                "end, or abort them, before update_weights"
            )
        if isinstance(weights, str | Path):
            source: Checkpoint | GivenWeights = Checkpoint(Path(weights).expanduser())
        else:
            source = GivenWeights(weights)
        with deferred_interrupt():  # half of them would be no model
            runner.update_weights(source)
            self.reset_prefix_cache()

    def exit(self) -> None:
        """Drops all requests and frees model and cache. A second call does nothing.

        Any other method raises `RuntimeError` afterwards.
        """
        self._mark_aborted(self.scheduler.abort_all())
        self._in_flight.clear()
        self._unreported.clear()
        if self._runner is not None:
            self._runner.exit()
            self._runner = None

    def _step(self) -> ScheduledBatch | None:
        """Does what `step` says; returns the completed step, if any.

        Each sequence that ended goes to its outbox. If anything raises, the steps in flight are
        forgotten and all residents start afresh.
        """
        runner = self._check_open()
        start = perf_counter()
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self._metrics.scheduled(batch)
                self._in_flight.append((batch, runner.launch(batch), start))
            # One step stays in flight, unless nothing new could be launched.
            may_wait = batch is not None and self.config.async_scheduling
            if not self._in_flight or (may_wait and len(self._in_flight) == 1):
                return None
            completed, handle, start = self._in_flight.popleft()
            ended = self.scheduler.postprocess(completed, handle.token_ids(), handle.logprobs())
        except BaseException:
            self._in_flight.clear()
            self._deliver(self.scheduler.recover())
            raise
        self._metrics.completed(completed, start)
        self._deliver(ended)
        self._forget_idle_steps()
        return completed

    def _abort(self, seq_ids: Iterable[int]) -> None:
        """Drops sequences, except those that have ended."""
        self._mark_aborted(self.scheduler.abort(list(seq_ids)))
        self._forget_idle_steps()

    def _forget_idle_steps(self) -> None:
        """Forgets the step in flight once no request is left: nobody needs its ids."""
        if self.scheduler.is_finished():
            self._in_flight.clear()
            self.scheduler.forget_steps_in_flight()

    def _enqueue(
        self, token_ids: "array[int]", params: SamplingParams, outbox: list[Sequence]
    ) -> Sequence:
        """Queues a checked request; returns its first sample.

        outbox: takes the samples as they end.
        """
        seq = Sequence(
            self._num_sequences,
            token_ids,
            params,
            max_model_len=self.config.max_model_len,
            seed=request_seed(params.seed, self.config.seed, self._num_requests),
            outbox=outbox,
        )
        self._num_requests += 1
        self._num_sequences += params.n
        self._metrics.added(seq)
        self.scheduler.add(seq)
        return seq

    def _deliver(self, ended: list[Sequence]) -> None:
        """Counts sequences that have ended, and puts each into its caller's outbox."""
        for seq in ended:
            if seq.finish_reason == "abort":  # it is the step that has dropped it
                dtype = self.config.torch_dtype
                seq.error = not_finite(seq.num_prompt_tokens, seq.num_completion_tokens, dtype)
            assert seq.outbox is not None
            seq.outbox.append(seq)
        self._metrics.ended(ended)

    def _mark_aborted(self, seqs: list[Sequence]) -> None:
        self._metrics.aborted(seqs)
        for seq in seqs:
            seq.finish_reason = "abort"

    def _check_sampling_params(self, params: object, what: str) -> None:
        """Raises an error that calls the parameters `what` if this model cannot serve them."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{what} must be a SamplingParams, got {params!r}")
        try:
            params.check_ids(self.config.hf_config.vocab_size, self.scheduler.stop_token_ids)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"{what}: stop strings are looked for in the text, but {self.config.model} has no "
                "tokenizer; pass stop_token_ids"
            )

    def _check_open(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("this engine has been closed by exit(); make a new LLM")
        return self._runner


def make_runner(config: Config) -> Runner:
    """Makes what computes: one rank in this process, or several in processes of their own."""
    if config.tensor_parallel_size == 1:
        return ModelRunner(config, TPGroup())
    return TensorParallelExecutor(config)
