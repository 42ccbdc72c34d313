"""Tests that streams give what `generate` gives, piece by piece, and mind nobody else."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import StreamOutput
from tests.helpers.engines import (
    GREEDY,
    SAMPLED,
    Ids,
    as_joined,
    drain,
    greedy_ids,
    joined,
    make_paged_llm,
    script,
)
from tests.helpers.faults import StepError, at_call, fail
from tests.helpers.texts import texts

PROMPT = [5, 6, 7]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3)


@pytest.fixture(scope="module")
def scripted_llm(tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3)


@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_stream_joins_to_what_generate_returns(scripted_llm: LLM, data: st.DataObject) -> None:
    """Completions are byte-level pieces, of whole characters or not; some end at stop strings."""
    llm = scripted_llm
    assert llm.tokenizer is not None
    text = "".join(data.draw(st.lists(texts, min_size=1, max_size=4)))
    encoded = llm.tokenizer.encode(text, add_special_tokens=False)
    wild = data.draw(st.lists(st.integers(0, len(llm.tokenizer) - 1), max_size=6))
    cut = data.draw(st.integers(0, len(encoded)))
    script(llm, (encoded[:cut] + wild + encoded[cut:])[:MAX_TOKENS], len(PROMPT))
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 5))
    stop = spans.map(lambda span: text[span[0] : sum(span)]).filter(bool) | st.text(
        min_size=1, max_size=2
    )
    params = st.builds(
        SamplingParams,
        temperature=st.just(1),
        n=st.integers(1, 2),
        max_tokens=st.integers(10, MAX_TOKENS),
        min_tokens=st.integers(0, 5),
        ignore_eos=st.booleans(),
        stop=st.lists(stop, max_size=3),
        include_stop_str_in_output=st.booleans(),
        skip_special_tokens=st.booleans(),
    )
    each = data.draw(st.lists(params, min_size=1, max_size=3))
    streamed = joined(llm.stream([PROMPT] * len(each), each))
    assert streamed == as_joined(llm.generate([PROMPT] * len(each), each, use_tqdm=False))


@pytest.mark.parametrize("num_blocks", [20, 128])
def test_all_prompts_at_once_also_with_preemption(
    tiny_qwen3: Path, prompts: list[Ids], num_blocks: int
) -> None:
    expected = as_joined(
        make_paged_llm(tiny_qwen3).generate(list(prompts), SAMPLED, use_tqdm=False)
    )
    llm = make_paged_llm(tiny_qwen3, num_kvcache_blocks=num_blocks)
    deltas = list(llm.stream(list(prompts), SAMPLED))
    assert joined(deltas) == expected
    if num_blocks == 128:  # else few run at a time
        assert {delta["index"] for delta in deltas[: len(prompts)]} == set(range(len(prompts)))
    assert all(delta.keys() == {"index", "text", "token_ids", "finish_reason"} for delta in deltas)
    assert llm.is_finished()


def test_items_come_as_steps_complete(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream)
    assert len(first["token_ids"]) == 1
    assert not llm.is_finished()
    assert sum(len(delta["token_ids"]) for delta in stream) == GREEDY.max_tokens - 1


def test_closing_aborts_the_rest(llm: LLM, prompts: list[Ids], hf_ids: list[Ids]) -> None:
    for close in (lambda stream: stream.close(), lambda _: None):
        stream: Iterator[StreamOutput] | None = llm.stream(list(prompts), GREEDY)
        assert stream is not None
        next(stream)
        assert not llm.is_finished()
        close(stream)
        del stream
        gc.collect()
        assert llm.is_finished()
        assert llm.scheduler.num_residents == 0
        llm.scheduler.block_manager.check_integrity([])
    llm.stream(list(prompts), GREEDY).close()  # before anything was queued
    assert llm.is_finished()
    assert greedy_ids(llm, prompts, 12) == hf_ids


def test_two_streams_in_turns_and_generate_and_step_meanwhile(
    llm: LLM, prompts: list[Ids], hf_ids: list[Ids]
) -> None:
    seq_id = llm.add_request(prompts[4], replace(GREEDY, max_tokens=3))
    streams = [llm.stream([prompts[i]], GREEDY) for i in (0, 1)]
    deltas: list[list[StreamOutput]] = [[], []]
    for _ in range(4):
        for stream, own in zip(streams, deltas, strict=True):
            own.append(next(stream))
    assert greedy_ids(llm, prompts[2:4], 12) == hf_ids[2:4]
    for stream, own in zip(streams, deltas, strict=True):
        own += stream
    assert [joined(own)[0, 0][1] for own in deltas] == hf_ids[:2]
    assert drain(llm) == {seq_id: hf_ids[4][:3]}


def test_closing_one_stream_leaves_the_other(llm: LLM, prompts: list[Ids]) -> None:
    expected = as_joined(llm.generate([prompts[0]], GREEDY, use_tqdm=False))
    kept, closed = llm.stream([prompts[0]], GREEDY), llm.stream([prompts[1]], GREEDY)
    deltas = [next(kept)]
    next(closed)
    closed.close()
    assert joined([*deltas, *kept]) == expected


def test_errors_come_with_the_call(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^prompt 1 is empty"):
        llm.stream(["a", ""])
    assert llm.is_finished()


def test_a_step_that_raises_ends_this_stream_and_no_other(
    tiny_qwen3: Path, prompts: list[Ids], hf_ids: list[Ids]
) -> None:
    llm = make_paged_llm(tiny_qwen3)
    assert llm._runner is not None
    other, failing = llm.stream([prompts[0]], GREEDY), llm.stream([prompts[1]], GREEDY)
    deltas = [next(other)]
    next(failing)
    at_call(llm._runner.model, 3, fail)
    with pytest.raises(StepError):
        list(failing)
    assert joined([*deltas, *other])[0, 0][1] == hf_ids[0]
    assert llm.is_finished()


def test_exit_ends_a_stream_with_abort(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    stream = llm.stream(PROMPT, GREEDY)
    assert next(stream)["finish_reason"] is None
    llm.exit()
    assert [delta["finish_reason"] for delta in stream] == ["abort"]
