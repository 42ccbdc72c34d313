"""Checks of a user's values, and what is kept of them. Each error names the field and the value."""

from collections.abc import Iterable, Mapping
from math import inf
from numbers import Integral, Real
from typing import Any

from nanovllm.utils.shown import shown


def checked_int(name: str, value: Any, low: int, high: float = inf, what: str = "an int") -> int:
    if type(value) is not int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name} must be {what}, got {shown(value)}")
        value = int(value)
    if not low <= value <= high:
        bounds = f">= {low}" if high == inf else f"in [{low}, {high}]"
        bounds = "in [0, 2**64)" if high == 2**64 - 1 else bounds
        raise ValueError(f"{name} must be {bounds}, got {shown(value)}")
    return int(value)


def checked_real(name: str, value: Any, low: float, high: float) -> float:
    number = as_float(name, value)
    if not low <= number <= high:  # nor nan
        raise ValueError(f"{name} must be in [{low}, {high}], got {shown(value)}")
    return number


def as_float(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of floats
        return inf if value > 0 else -inf  # type: ignore[operator]


def checked_texts(name: str, value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a str or a list of str, got {shown(value)}")
    if "" in texts:
        raise ValueError(f"{name} must be texts of at least one character, got {shown(value)}")
    return tuple(texts)


def checked_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of token ids, got {shown(value)}")
    ids = tuple(value)
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:  # C speed: it may be long
        return ids
    name = f"{name} must be a list of token ids; each"
    return tuple(checked_int(name, item, 0) for item in ids)


def checked_biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict from token id to number, got {shown(value)}")
    what = f"{name} must be a dict from token id to number; each"
    return {
        checked_int(f"{what} id", token_id, 0): checked_real(f"{what} number", bias, -100, 100)
        for token_id, bias in value.items()
    }
