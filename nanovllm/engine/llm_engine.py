"""The request lifecycle and the step loop: check, schedule, launch, complete."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch, StepHandle
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.checkpoint_check import check_checkpoint
from nanovllm.engine.construction import frees_all_if_it_fails
from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.executor import TensorParallelExecutor
from nanovllm.engine.interrupts import deferred_interrupt
from nanovllm.engine.metrics import Metrics, MetricsRecorder
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.numerical_error import NumericalError
from nanovllm.engine.prompts import Prompt, PromptReader
from nanovllm.engine.request_times import RequestTimer
from nanovllm.engine.requests import Requests
from nanovllm.engine.results import completion_output
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.tokenizer import check_tokenizer, load_tokenizer, stop_token_ids
from nanovllm.engine.turns import Caller, Turns
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.given_weights import GivenWeights
from nanovllm.utils.shown import shown

logger = logging.getLogger("nanovllm")

Runner = ModelRunner | TensorParallelExecutor
T = TypeVar("T")


class LLMEngine:
    """Serves requests on one model. Its keywords are the fields of `Config`.

    Any thread of the process that made it may call its methods; calls of several threads are served
    together, by the same steps.
    """

    @frees_all_if_it_fails
    def __init__(self, model: str, **kwargs: Any) -> None:
        start = perf_counter()
        self.config = Config.from_kwargs(model, **kwargs)
        check_checkpoint(self.config)
        self.tokenizer = load_tokenizer(self.config.model, self.config.hf_config)
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer, self.config.model, self.config.hf_config.vocab_size)
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
        self._requests = Requests(self.scheduler, self.config, self._metrics)
        # Launched, not read: the step, what will have its ids, and when it was scheduled.
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle, float]] = deque()
        self._turns = Turns()
        self._is_whole = True  # no use of the state above has been cut short
        self._is_closed = False
        seconds = perf_counter() - start
        logger.info("%s, ready after %.1f s", self._runner.description, seconds)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queues one request and returns its id. With n > 1, sample i has the id plus i.

        Raises `TypeError` or `ValueError` if the request cannot be served.
        """
        self._check_open()
        self._check_sampling_params(sampling_params, "sampling_params")
        token_ids = self._prompts.token_ids(prompt, "prompt")
        firsts: list[Sequence] = []
        request = token_ids, sampling_params
        self._visit(lambda: self._requests.queue([request], self._requests.unreported, firsts))
        return firsts[0].seq_id

    def abort(self, seq_id: int) -> None:
        """Drops a request; `step` never returns those of its samples that have not ended yet.

        While another thread steps, it waits for that step. A signal handler may call it, too.

        seq_id: what `add_request` has returned; nothing happens if the request has ended.
        """
        if not isinstance(seq_id, int) or isinstance(seq_id, bool):
            raise TypeError(f"seq_id must be an int that add_request returned, got {shown(seq_id)}")
        if not 0 <= seq_id < self._requests.num_sequences:
            raise ValueError(f"seq_id must be an id that add_request returned, got {shown(seq_id)}")
        self._check_process()
        self._abort(self.scheduler.unfinished_samples(seq_id))

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Launches one step and completes the one before it, or with `async_scheduling` off itself.

        Returns the samples that ended in the completed step, as (id, completion token ids), and a
        count: the prompt tokens that the step computed, or if it computed none minus the sequences
        that it decoded. It returns ([], 0) if there is no step to complete, as in the first call.

        Raises `NumericalError` for samples that failed; the next call returns what ended with them.
        """
        seqs, count = self._visit(self._reported_step)
        errors = {f"request {seq.seq_id}": seq.error for seq in seqs if seq.error is not None}
        if errors:
            raise NumericalError(errors, [completion_output(seq, self._decoder) for seq in seqs])
        return [(seq.seq_id, seq.completion_token_ids) for seq in seqs], count

    def is_finished(self) -> bool:
        """Whether every request has ended and been returned by `step`."""
        self._check_process()
        return self._requests.are_all_reported

    def metrics(self) -> Metrics:
        """Returns what the engine has done since it was made, as plain numbers; `Metrics` says what
        each means. It works after `exit`, too."""
        if self._is_closed:
            return self._metrics.report()
        return self._visit(self._metrics.report)

    def reset_prefix_cache(self) -> None:
        """Forgets all K/V that later prompts could find; what runs keeps its own."""
        self._visit(self.scheduler.block_manager.reset)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | str | Path) -> None:
        """Replaces all weights in place, on all ranks, and resets the prefix cache.

        weights: (name, tensor) pairs with the names and shapes of the checkpoint's tensors, of any
            floating dtype and on any device; or a checkpoint directory.

        Raises `ValueError` or `TypeError`, and leaves the old weights in use, if a name, a shape or
        a dtype is wrong; `RuntimeError` while requests run. If anything else raises, half of the
        weights may be new, and the engine is closed.
        """
        self._check_open()
        if isinstance(weights, str | Path):
            source: Checkpoint | GivenWeights = Checkpoint(Path(weights).expanduser())
        else:
            source = GivenWeights(weights)
        with deferred_interrupt():  # half of them would be no model
            num_running = self._visit(lambda: self._replace_weights(source))
        if num_running:
            raise RuntimeError(
                f"{num_running} requests still run on the old weights; let them end, or abort "
                "them, before update_weights"
            )

    def exit(self) -> None:
        """Drops all requests and frees model and cache. A second call does nothing.

        Any other method raises `RuntimeError` afterwards, and so do calls in other threads, after
        the step that runs. A forked child's call leaves its parent's engine alone.
        """
        if self._turns.is_elsewhere:
            return
        self._is_closed = True
        if self._turns.is_inside:
            return  # a signal handler's call: what it interrupts comes to an end first
        with self._turns.door, self._turns.room:
            self._mend()
            self._requests.drop_all()
            if self._runner is not None:
                self._runner.exit()
                self._runner = None
        self._turns.wake_all()

    def _advance(self, caller: Caller) -> ScheduledBatch | None:
        """Runs a step, which it returns once completed; or waits for the news of another thread's
        steps. The caller has found this thread not to be in the middle of a use of the engine."""
        if self._turns.may_drive(caller):
            self._check_process()
            try:
                with self._turns.door:  # others may want in
                    pass
                return self._in_room(self._step)
            finally:
                self._exit_if_closed()
        self._turns.sleep(caller)
        self._check_open()
        return None

    def _visit(self, work: Callable[[], T]) -> T:
        """Does something short on the engine's state, between two steps of other threads."""
        self._check_open()
        try:
            with self._turns.door:
                return self._in_room(work)
        finally:
            self._exit_if_closed()

    def _in_room(self, work: Callable[[], T]) -> T:
        """Does `work` on the engine's state while no other thread does.

        Whatever cuts it short, the state is whole again before anybody uses it: all requests that
        have not ended start afresh.
        """
        with self._turns.room:
            self._mend()
            self._is_whole = False
            try:
                result = work()
                self._is_whole = True
            finally:
                self._mend()
        return result

    def _mend(self) -> None:
        """Makes the state whole, and drops what is to be dropped."""
        if not self._is_whole:
            self._in_flight.clear()
            self.scheduler.recover()
            self._requests.deliver_ended()
            self._is_whole = True
        if self._requests.has_some_to_drop:
            self._is_whole = False
            self._requests.drop_asked()
            self._forget_idle_steps()
            self._is_whole = True

    def _step(self) -> ScheduledBatch | None:
        """Does what `step` says; returns the completed step, if any.

        Each sequence that ended goes to its outbox.
        """
        runner = self._check_runner()
        start = perf_counter()
        batch = self.scheduler.schedule()
        if batch is not None:
            self._metrics.scheduled(batch)
            self._in_flight.append((batch, runner.launch(batch), start))
        # One step stays in flight, unless nothing new could be launched.
        may_wait = batch is not None and self.config.async_scheduling
        if not self._in_flight or (may_wait and len(self._in_flight) == 1):
            return None
        completed, handle, start = self._in_flight.popleft()
        self.scheduler.postprocess(completed, handle.token_ids(), handle.logprobs())
        self._metrics.completed(completed, start)
        self._requests.deliver_ended()
        self._forget_idle_steps()
        self._turns.note_step()
        return completed

    def _reported_step(self) -> tuple[list[Sequence], int]:
        """Returns what `step` reports: if any sequence has failed those that have, else all that
        have ended; and its count."""
        batch = self._step()
        unreported = self._requests.unreported
        ended = list(unreported.values())
        reported = [seq for seq in ended if seq.error is not None] or ended
        for seq in reported:
            del unreported[seq.seq_id]
        return reported, (batch.num_prefilled or -batch.num_decoded if batch else 0)

    def _replace_weights(self, source: Checkpoint | GivenWeights) -> int:
        """Returns how many requests still run; replaces the weights if none does."""
        runner = self._check_runner()
        if self.scheduler.is_finished():
            self.scheduler.block_manager.reset()  # first: no K/V of the old weights may remain
            try:
                runner.update_weights(source)
            except (ValueError, TypeError):
                raise
            except BaseException:
                self._is_closed = True
                raise
        return len(self.scheduler.unfinished)

    def _abort(self, seq_ids: Iterable[int]) -> None:
        """Drops sequences, except those that have ended.

        What interrupts this thread's use of the engine, such as a finalizer, may call it: they are
        dropped after that use.
        """
        if self._turns.is_elsewhere:  # in a forked child, which has a copy of the requests
            return
        self._requests.ask_to_drop(seq_ids)
        if not self._turns.is_inside:
            with self._turns.door, self._turns.room:
                self._mend()

    def _forget_idle_steps(self) -> None:
        """Forgets the step in flight once no request is left: nobody needs its ids."""
        if self.scheduler.is_finished():
            self._in_flight.clear()
            self.scheduler.forget_steps_in_flight()

    def _check_sampling_params(self, params: object, what: str) -> None:
        """Raises an error that calls the parameters `what` if this model cannot serve them."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{what} must be a SamplingParams, got {shown(params)}")
        try:
            params.check_ids(self.config.hf_config.vocab_size, self.scheduler.stop_token_ids)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"{what}: stop strings are looked for in the text, but {self.config.model} has no "
                "tokenizer; pass stop_token_ids"
            )

    def _check_process(self) -> None:
        """Raises `RuntimeError` in a forked child."""
        if self._turns.is_elsewhere:
            self._turns.check()

    def _check_open(self) -> Runner:
        """Returns the runner; raises `RuntimeError` if this thread cannot use the engine now."""
        self._turns.check()
        return self._check_runner()

    def _check_runner(self) -> Runner:
        if self._runner is None or self._is_closed:
            raise RuntimeError("this engine has been closed by exit(); make a new LLM")
        return self._runner

    def _exit_if_closed(self) -> None:
        """Does what a signal handler's call of `exit` has left to be done."""
        if self._is_closed:
            self.exit()


def make_runner(config: Config) -> Runner:
    """Makes what computes: one rank in this process, or several in processes of their own."""
    if config.tensor_parallel_size == 1:
        return ModelRunner(config, TPGroup())
    return TensorParallelExecutor(config)
