"""Tests what a `SamplingParams` keeps of what it is given. Bad values are in llm/test_errors.py."""

import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from nanovllm import SamplingParams

GIVEN: list[tuple[str, Any, Any]] = [
    ("n", np.int64(3), 3),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", np.int32(2), 2.0),
    ("top_k", np.int16(-1), -1),
    ("top_p", np.float64(0.25), 0.25),
    ("top_p", 1, 1.0),
    ("min_p", np.float16(0.5), 0.5),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("max_tokens", np.uint8(7), 7),
    ("min_tokens", np.int64(64), 64),
    ("stop", None, ()),
    ("stop", "ab", ("ab",)),
    ("stop", ["b", "a"], ("b", "a")),
    ("stop_token_ids", None, ()),
    ("stop_token_ids", [np.int64(4), 2], (4, 2)),
    ("stop_token_ids", {9}, (9,)),
    ("allowed_token_ids", np.array([5, 3]), (5, 3)),
    ("allowed_token_ids", range(2), (0, 1)),
    ("repetition_penalty", np.float32(1.5), 1.5),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", np.int64(1), 1.0),
    ("logit_bias", {np.int64(3): np.float32(-1.5), 4: 100}, {3: -1.5, 4: 100.0}),
    ("logprobs", np.int64(0), 0),
    ("prompt_logprobs", np.int64(20), 20),
]


@pytest.mark.parametrize(("name", "value", "kept"), GIVEN, ids=str)
def test_values_are_kept_as_plain_python(name: str, value: Any, kept: Any) -> None:
    params = SamplingParams(**{name: value})
    stored = getattr(params, name)
    assert stored == kept
    for inner, expected in zip(_flat(stored), _flat(kept), strict=True):
        assert type(inner) is type(expected)
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(**{name: kept}))
    with pytest.raises(FrozenInstanceError):
        setattr(params, name, kept)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, tuple) else [value]


def test_what_the_caller_changes_later_does_not_matter() -> None:
    stop, bias, ids = ["a"], {1: 1.0}, [7]
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=ids, allowed_token_ids=ids)
    stop.append("")
    bias[1] = 1e9
    ids.append(-1)
    assert params == SamplingParams(
        stop="a", logit_bias={1: 1}, stop_token_ids=[7], allowed_token_ids=[7]
    )


def test_every_field_is_a_keyword_only() -> None:
    assert all(field.kw_only for field in fields(SamplingParams))
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"n": 2, "temperature": 0}, "^n must be 1 with temperature 0.*got 2"),
        ({"min_tokens": 5, "max_tokens": 4}, "^min_tokens must be at most max_tokens=4, got 5"),
        ({"stop": "a", "detokenize": False}, "^detokenize must be True with stop strings"),
    ],
)
def test_fields_that_exclude_each_other(params: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        SamplingParams(**params)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_beyond_the_vocabulary(name: str) -> None:
    ids: Any = {3: 1.0, 9: 1.0} if name == "logit_bias" else [9, 3]
    params = SamplingParams(**{name: ids})
    params.check_ids(10, ())
    with pytest.raises(ValueError, match=f"^{name} must be ids below.*vocabulary of 9, got 9"):
        params.check_ids(9, ())


def test_allowed_ids_that_all_end_the_request_before_they_may() -> None:
    params: dict[str, Any] = {"min_tokens": 1, "allowed_token_ids": [1, 7], "stop_token_ids": [7]}
    with pytest.raises(ValueError, match=r"^allowed_token_ids must be.*min_tokens=1, got \[1, 7\]"):
        SamplingParams(**params).check_ids(10, eos_token_ids=[1])
    SamplingParams(**params, ignore_eos=True).check_ids(10, eos_token_ids=[1])
    SamplingParams(**params | {"min_tokens": 0}).check_ids(10, eos_token_ids=[1])
    SamplingParams(**params).check_ids(10, eos_token_ids=[2])


def test_ids_that_end_a_request() -> None:
    params = SamplingParams(stop_token_ids=[7])
    assert params.ending_ids([1, 2]) == {1, 2, 7}
    assert SamplingParams(stop_token_ids=[7], ignore_eos=True).ending_ids([1, 2]) == {7}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, "plain"),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5}, "plain"),  # keep the most likely token
        ({"top_k": -1, "logit_bias": {}, "seed": 1, "stop": "a"}, "plain"),
        ({"top_k": 5}, "filtered"),
        ({"top_p": 0.5}, "filtered"),
        ({"min_p": 0.5}, "filtered"),
        ({"logprobs": 0}, "reported"),
        ({"prompt_logprobs": 0}, "reported"),
        ({"min_tokens": 1}, "edited"),
        ({"allowed_token_ids": [0]}, "edited"),
        ({"logit_bias": {0: 0.0}}, "edited"),
        ({"repetition_penalty": 1.1, "temperature": 0}, "edited"),
        ({"presence_penalty": -1}, "edited"),
        ({"frequency_penalty": 0.5}, "edited"),
    ],
    ids=str,
)
def test_what_takes_more_than_a_plain_draw(params: dict[str, Any], expected: str) -> None:
    made = SamplingParams(**params)
    assert made.is_plain == (expected == "plain")
    assert made.is_filtered == (expected == "filtered")
    assert made.edits_logits == (expected == "edited")
    assert made.has_penalties == any("penalty" in name for name in params)
