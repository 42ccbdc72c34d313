"""Draws random requests, and knows what each gives when it is served alone."""

import random
from dataclasses import dataclass
from typing import Any

from nanovllm import LLM, SamplingParams
from tests.helpers.checkpoints import CORPUS, VOCAB_SIZE
from tests.helpers.engines import Ids

MAX_LEN = 64  # of prompt and completion


@dataclass(frozen=True)
class Request:
    prompt: str | tuple[int, ...]
    params: SamplingParams

    @property
    def given(self) -> Any:
        return self.prompt if isinstance(self.prompt, str) else list(self.prompt)


class RandomRequests:
    """Draws prompts, of which many begin alike, and parameters of all kinds.

    Random ones have seeds: so what they give does not depend on what else the engine has served.
    """

    def __init__(self, seed: int, num_requests: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes = [self._ids(40) for _ in range(3)]
        self._requests = [self._new() for _ in range(num_requests)]

    def draw(self, rng: random.Random) -> Request:
        """Returns one of the requests that there are, so that it has often been served alone."""
        return rng.choice(self._requests)

    def _new(self) -> Request:
        while True:
            try:
                params = SamplingParams(**self._fields())
                params.check_ids(VOCAB_SIZE, [1])
                return Request(self._prompt(), params)
            except ValueError:  # fields that do not go together
                continue

    def _prompt(self) -> str | tuple[int, ...]:
        rng = self._rng
        if rng.random() < 0.15:
            text = rng.choice(CORPUS)
            return text[: rng.randint(1, 30)]
        if rng.random() < 0.1:
            return tuple(self._ids(MAX_LEN - 1))
        prefix = rng.choice(self._prefixes)[: rng.choice([0, 4, 8, 15, 16, 17, 40])]
        return tuple(prefix + self._ids(rng.choice([1, 1, 2, 5, 20])))

    def _ids(self, num: int) -> Ids:
        return [self._rng.randrange(2, VOCAB_SIZE) for _ in range(num)]

    def _fields(self) -> dict[str, Any]:
        rng = self._rng
        wanted: dict[str, Any] = {"temperature": rng.choice([0, 0, 0.5, 1.0, 1.0, 3.0])}
        wanted["max_tokens"] = rng.choice([1, 2, 3, 5, 8, 8, 8, 13, 13, 100])
        if wanted["temperature"]:
            wanted["seed"] = rng.getrandbits(64)
            wanted["n"] = rng.choice([1, 1, 1, 2, 5])
        if rng.random() < 0.4:  # a plain one
            return wanted | {"ignore_eos": True}
        choices: dict[str, Any] = {
            "top_k": [-1, 1, 3, 20, 10**6],
            "top_p": [0.1, 0.7, 0.95],
            "min_p": [0.01, 0.5],
            "min_tokens": [1, 3, 7],
            "ignore_eos": [True],
            "stop": ["e", ["th", "in "], [" ", "zzz"], CORPUS[2][:9]],
            "stop_token_ids": [self._ids(60), [1]],
            "include_stop_str_in_output": [True],
            "skip_special_tokens": [True],
            "detokenize": [False],
            "repetition_penalty": [1.3, 0.7],
            "presence_penalty": [1.5, -0.5],
            "frequency_penalty": [0.8, -1.0],
            "logit_bias": [dict.fromkeys(self._ids(5), 4.5), {3: -100, 4: 100, 1: 2}],
            "allowed_token_ids": [self._ids(30), [*self._ids(2), 1]],
            "logprobs": [0, 1, 20],
            "prompt_logprobs": [0, 3],
        }
        for name in rng.sample(sorted(choices), rng.randint(1, 5)):
            wanted[name] = rng.choice(choices[name])
        return wanted


class Alone:
    """Serves requests one at a time on an engine of its own, and remembers what they gave."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._known: dict[Request, Any] = {}

    def output(self, request: Request) -> Any:
        if request not in self._known:
            (output,) = self._llm.generate([request.given], request.params, use_tqdm=False)
            self._known[request] = output
        return self._known[request]

    def ids(self, request: Request, sample: int) -> Ids:
        output = self.output(request)
        ids: Ids = output.get("outputs", [output])[sample]["token_ids"]
        return ids


def differences(got: Any, expected: Any) -> list[str]:
    """Returns the names of fields that differ; log probabilities may do so by rounding."""
    different = [
        name
        for name in got.keys() | expected.keys()
        if name not in got or (name not in expected or not _agree(got[name], expected[name]))
    ]
    return sorted(different)


def _agree(got: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return bool(abs(got - expected) < 1e-3)
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_agree(got[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(_agree, got, expected))
    return bool(got == expected)
