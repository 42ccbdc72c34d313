"""Does random things to an engine, and checks each completion against the same request alone."""

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from inspect import GEN_CREATED, getgeneratorstate
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM
from nanovllm.engine.batch import ScheduledBatch, StepHandle, StepLogprobs
from tests.helpers.checkpoints import VOCAB_SIZE
from tests.helpers.engines import Ids, joined, make_llm
from tests.helpers.faults import StepError
from tests.helpers.fuzz_requests import MAX_LEN, Alone, RandomRequests, Request, differences

ERRORS: list[type[BaseException]] = [StepError, KeyboardInterrupt, torch.OutOfMemoryError]
BAD_PROMPTS: list[Any] = [[], [VOCAB_SIZE], [-1], [2] * MAX_LEN, "x \ud83d", [2.5], None, [[2], []]]


def random_config(rng: random.Random) -> dict[str, Any]:
    """Returns keywords of an engine, of which most are tight."""
    block_size = rng.choice([1, 4, 4, 16])
    blocks = -(-MAX_LEN // block_size)
    return {
        "max_model_len": MAX_LEN,
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": blocks + rng.choice([0, 1, blocks // 2, 4 * blocks]),
        "max_num_seqs": rng.choice([2, 5, 40, 40]),
        "max_num_batched_tokens": rng.choice([5, 16, 64, 1024]),
        "async_scheduling": rng.random() < 0.6,
        "enable_prefix_caching": rng.random() < 0.8,
        "attention_backend": rng.choice(["auto", "auto", "torch"]),
        "request_metrics": rng.random() < 0.5,
    }


class _FailsAt(TorchDispatchMode):
    """Raises `error` instead of torch's operation `number`, counted from 0."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__()
        self._left = number
        self._error = error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left == -1:
            raise self._error
        return func(*args, **(kwargs or {}))


@dataclass
class _FailingStep:
    """A step that fails when its ids, or what it reports, are read."""

    step: StepHandle
    error: BaseException
    fails_late: bool

    def token_ids(self) -> Ids:
        if not self.fails_late:
            raise self.error
        return self.step.token_ids()

    def logprobs(self) -> StepLogprobs:
        raise self.error


@dataclass
class _Stream:
    requests: list[Request]
    items: Generator[Any, None, None]
    deltas: list[Any] = field(default_factory=list)


class FuzzedEngine:
    """An engine, what it owes, and random actions on it.

    checkpoints, alone: two sets of weights, and what requests give with each.
    num_checked: completions that were compared.
    """

    def __init__(
        self,
        rng: random.Random,
        checkpoints: list[Path],
        alone: list[Alone],
        requests: RandomRequests,
        config: dict[str, Any],
        *,
        fails: bool = True,
    ) -> None:
        self._rng = rng
        self._checkpoints = checkpoints
        self._alone = alone
        self._version = 0
        self._fails = fails
        self.config = config
        self.llm: LLM = make_llm(checkpoints[0], **config)
        self._requests = requests
        self._pending: dict[int, tuple[Request, int]] = {}  # by sequence id: its sample
        self._streams: list[_Stream] = []
        self._num_added = 0
        self._fault: tuple[str, BaseException] | None = None
        self._injected: list[BaseException] = []
        self.num_checked = 0
        self.done: Counter[str] = Counter()
        if fails:
            self._launch = self.llm._runner.launch  # type: ignore[union-attr]
            self.llm._runner.launch = self._launch_or_fail  # type: ignore[union-attr, assignment]

    def act(self) -> None:
        """Does one random thing, and checks what can be checked after it."""
        action: Callable[[], None] = self._rng.choices(
            [
                self._add, self._add_bad, self._step, self._abort, self._generate,
                self._open_stream, self._read_stream, self._close_stream, self._fail_in_a_while,
                self._reset, self._update, self._update_badly,
            ],
            [12, 2, 14, 3, 6, 3, 14, 2, 3 if self._fails else 0, 1, 1, 1],
        )[0]  # fmt: skip
        self.done[action.__name__] += 1
        action()
        self._check()

    def finish(self) -> None:
        """Ends all that is open, checks it, and exits."""
        self._fault = None
        while self._streams:
            self._read_stream()
        while not self.llm.is_finished():
            self._step()
        assert not self._pending, "requests were lost"
        manager = self.llm.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks, "blocks were lost"
        assert self.llm.scheduler.num_residents == 0, "rows were lost"
        self._check()
        self.llm.exit()

    def _add(self) -> None:
        request = self._requests.draw(self._rng)
        seq_id = self.llm.add_request(request.given, request.params)
        self._num_added += request.params.n
        for sample in range(request.params.n):
            self._pending[seq_id + sample] = request, sample

    def _add_bad(self) -> None:
        bad, call = self._rng.choice(BAD_PROMPTS), self._rng.randrange(3)
        good = self._requests.draw(self._rng)
        try:
            if call == 0 and bad != [[2], []]:
                self.llm.add_request(bad, good.params)
            elif call == 1:
                self.llm.generate([good.given, bad], good.params, use_tqdm=False)
            else:
                self.llm.stream([good.given, bad], good.params)
        except (TypeError, ValueError):
            return
        raise AssertionError(f"{bad!r} was accepted")

    def _step(self) -> None:
        with self._expected_fault():
            for seq_id, ids in self.llm.step()[0]:
                request, sample = self._pending.pop(seq_id)
                self._compare(ids, self._alone[self._version].ids(request, sample), request)

    def _abort(self) -> None:
        last = self.llm._requests.num_sequences
        if not last:
            return
        seq_id = self._rng.choice([*self._pending, self._rng.randrange(last)])
        first = seq_id
        if seq_id in self._pending:
            first = seq_id - self._pending[seq_id][1]
        elif any(True for _ in self._streams):
            return  # it may be of a stream, whose other samples would be missed
        self.llm.abort(first)
        # What has ended, and waits for `step` to return it, is not dropped.
        unreported = self.llm._requests.unreported.keys()
        for i in [i for i, (_, sample) in self._pending.items() if i - sample == first]:
            if i not in unreported:
                del self._pending[i]

    def _generate(self) -> None:
        requests = [self._requests.draw(self._rng) for _ in range(self._rng.choice([1, 3, 8, 20]))]
        self._num_added += sum(request.params.n for request in requests)
        with self._expected_fault():
            outputs = self.llm.generate(
                [request.given for request in requests],
                [request.params for request in requests],
                use_tqdm=False,
            )
            for request, output in zip(requests, outputs, strict=True):
                self._compare_output(output, request)

    def _open_stream(self) -> None:
        requests = [self._requests.draw(self._rng) for _ in range(self._rng.choice([1, 2, 4]))]
        prompts = [request.given for request in requests]
        items = self.llm.stream(prompts, [request.params for request in requests])
        self._streams.append(_Stream(requests, items))

    def _read_stream(self) -> None:
        if not self._streams:
            return
        stream = self._rng.choice(self._streams)
        if getgeneratorstate(stream.items) == GEN_CREATED:
            self._num_added += sum(request.params.n for request in stream.requests)
        try:
            for _ in range(self._rng.choice([1, 3, 1000])):
                stream.deltas.append(next(stream.items))
        except StopIteration:
            self._streams.remove(stream)
            self._check_stream(stream)
        except tuple(ERRORS) as error:
            self._streams.remove(stream)
            self.check_injected(error)

    def _check_stream(self, stream: _Stream) -> None:
        got = joined(stream.deltas)
        for i, request in enumerate(stream.requests):
            output = self._alone[self._version].output(request)
            for sample, completion in enumerate(output.get("outputs", [output])):
                text, ids, reason = got[i, sample]
                self._compare(ids, completion["token_ids"], request)
                assert (text, reason) == (completion["text"], completion["finish_reason"])

    def _close_stream(self) -> None:
        if self._streams:
            self._streams.pop(self._rng.randrange(len(self._streams))).items.close()

    def _fail_in_a_while(self) -> None:
        where = self._rng.choice(["before", "within", "within", "after", "read", "report"])
        self._fault = where, self._rng.choice(ERRORS)("injected")

    def _reset(self) -> None:
        self.llm.reset_prefix_cache()

    def _update(self) -> None:
        version = self._rng.randrange(2)
        is_idle = self.llm.scheduler.is_finished()
        try:
            self.llm.update_weights(self._checkpoints[version])
        except RuntimeError:
            assert not is_idle
            return
        assert is_idle, "weights were changed under running requests"
        if self._streams or self._pending:  # begun or ended, but not compared yet
            self.llm.update_weights(self._checkpoints[self._version])
        else:
            self._version = version

    def _update_badly(self) -> None:
        error = ValueError if self.llm.scheduler.is_finished() else RuntimeError
        try:
            self.llm.update_weights([("model.norm.weight", torch.zeros(3))])
        except error:
            return
        raise AssertionError("bad weights were accepted")

    def _expected_fault(self) -> "_ExpectedFault":
        return _ExpectedFault(self)

    def check_injected(self, error: BaseException) -> None:
        assert any(error is one for one in self._injected), "an error that nobody has injected"

    def _launch_or_fail(self, batch: ScheduledBatch) -> StepHandle:
        """Launches a step, or fails once if `_fault` says so and luck has it."""
        if self._fault is None or self._rng.random() < 0.5:
            return self._launch(batch)
        (where, error), self._fault = self._fault, None
        self._injected.append(error)
        self.done[f"fault {where}"] += 1
        if where == "before":
            raise error
        if where == "within":
            with _FailsAt(self._rng.randrange(300), error):
                return self._launch(batch)
        step = self._launch(batch)
        if where == "after":
            raise error
        return _FailingStep(step, error, fails_late=where == "report")

    def _compare_output(self, output: Any, request: Request) -> None:
        expected = self._alone[self._version].output(request)
        pairs = zip(
            output.get("outputs", [output]), expected.get("outputs", [expected]), strict=True
        )
        for got, alone in pairs:
            own = {name: got[name] for name in got if name not in ("outputs", "metrics")}
            others = {name: alone[name] for name in alone if name != "outputs"}
            assert not (wrong := differences(own, others)), (wrong, got, alone, request)
            assert ("metrics" in got) == self.config["request_metrics"]
            self.num_checked += 1

    def _compare(self, ids: Ids, expected: Ids, request: Request) -> None:
        assert ids == expected, (ids, expected, request)
        self.num_checked += 1

    def _check(self) -> None:
        scheduler = self.llm.scheduler
        scheduler.block_manager.check_integrity(scheduler.unfinished)
        requests = dict(self.llm.metrics()["requests"])
        added = requests.pop("added")
        assert added == self._num_added == sum(requests.values()), requests
        assert requests["failed"] == 0


class _ExpectedFault:
    """Lets an injected error pass, and no other."""

    def __init__(self, engine: FuzzedEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> bool:
        if not isinstance(error, tuple(ERRORS)):
            return False
        self._engine.check_injected(error)
        return True
