"""Tests that values in errors are written whole or in part, whatever they are."""

from pathlib import Path

import pytest

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.utils.shown import MAX_SHOWN, shown


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("x" * 1000)


@pytest.mark.parametrize(
    ("value", "beginning"),
    [
        (5, "5"),
        ("a\ud83d", "'a\\ud83d'"),
        (["y" * 10] * 10**4, "['yyyyyyyyyy', 'yy"),
        (10**5000, "a value of type int ("),
        (Unprintable(), "a value of type Unprintable ("),
    ],
    ids=["int", "surrogate", "list", "long int", "unprintable"],
)
def test_a_value_is_short(value: object, beginning: str) -> None:
    assert shown(value).startswith(beginning)
    assert len(shown(value)) < 2 * MAX_SHOWN


@pytest.mark.parametrize("value", ["x" * 10**5, [1] * 10**5, 10**5000], ids=["text", "list", "int"])
def test_errors_about_knobs_are_short(value: object, tiny_qwen3: Path) -> None:
    knobs = ("max_num_seqs", "kvcache_block_size", "gpu_memory_utilization", "seed", "device")
    for name in (*knobs, "dtype", "revision", "enforce_eager", "async_scheduling"):
        with pytest.raises((TypeError, ValueError), match=name) as caught:
            Config(str(tiny_qwen3), **{name: value})
        assert len(str(caught.value)) < 1000
    with pytest.raises((TypeError, ValueError), match=r"^model ") as caught:
        Config(value)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1000
    for name in ("temperature", "max_tokens", "n", "top_p", "logit_bias", "seed"):
        with pytest.raises((TypeError, ValueError)) as caught:
            SamplingParams(**{name: [value]})
        assert len(str(caught.value)) < 1000
