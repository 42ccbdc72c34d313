"""Tests the figures of an engine and of its requests, and that it says one line when it is made."""

import logging
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.metrics import Metrics
from tests.helpers.engines import GREEDY, SAMPLED, Ids, drain, make_llm, make_paged_llm
from tests.helpers.faults import StepError, at_call, fail


def check_sums(metrics: Metrics) -> None:
    requests, blocks = metrics["requests"], metrics["blocks"]
    others = sum(count for name, count in requests.items() if name != "added")  # type: ignore[misc]
    assert requests["added"] == others
    assert 0 <= blocks["used"] <= blocks["peak"] <= blocks["total"]
    for times in metrics["steps"].values():
        assert isinstance(times, dict)
        assert 0 <= times["mean"] <= times["max"] <= times["total"]
        assert times["mean"] * times["count"] == pytest.approx(times["total"])


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_call_is_counted(tiny_qwen3: Path, async_scheduling: bool) -> None:
    llm = make_paged_llm(tiny_qwen3, async_scheduling=async_scheduling, max_num_seqs=3)
    prompts = [[i, i + 1, i + 2] for i in range(5, 9)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    metrics = llm.metrics()
    check_sums(metrics)
    assert metrics["requests"] == {
        "added": 4, "stop": 0, "length": 4, "aborted": 0, "failed": 0, "running": 0, "waiting": 0,
    }  # fmt: skip
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    assert metrics["tokens"] == {"prompt": 12, "completion": num_tokens}
    assert metrics["blocks"]["used"] == 0
    # Three at a time of 3 + 12 tokens, of which the last is never computed, in blocks of 4.
    assert metrics["blocks"]["peak"] == 3 * 4
    steps = metrics["steps"]
    assert steps["prefill"]["count"] + steps["mixed"]["count"] >= 2
    assert steps["decode"]["count"] >= 2 * 11
    assert steps["decode"]["total"] > 0
    assert metrics["preemptions"] == 0
    assert metrics["prefix_cache"] == {"asked": 12, "found": 0, "hit_rate": 0.0}
    llm.exit()
    assert llm.metrics() == metrics


def test_kinds_of_steps(tiny_qwen3: Path) -> None:
    llm = make_llm(tiny_qwen3, async_scheduling=False, max_num_batched_tokens=8)
    llm.add_request([2, 3], GREEDY)
    llm.step()  # prompt
    llm.step()  # token
    llm.add_request(list(range(2, 12)), GREEDY)
    llm.step()  # token, and 7 of 10
    llm.step()  # token, and the rest
    llm.step()  # two tokens
    counts = {kind: times["count"] for kind, times in llm.metrics()["steps"].items()}  # type: ignore[index]
    assert counts == {"prefill": 1, "decode": 2, "mixed": 2}
    assert llm.metrics()["requests"]["running"] == 2
    assert llm.metrics()["tokens"]["completion"] == 5 + 2


def test_ends_of_each_kind(tiny_qwen3: Path) -> None:
    llm = make_llm(tiny_qwen3, max_num_seqs=1)
    greedy = llm.generate([2, 3], GREEDY, use_tqdm=False)[0]["token_ids"]
    stopping = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[greedy[1]])
    llm.generate([2, 3], stopping, use_tqdm=False)
    running = llm.add_request([4, 5], GREEDY)
    llm.add_request([6, 7], SamplingParams(n=3))
    llm.step()
    assert llm.metrics()["requests"]["running"] == 1
    assert llm.metrics()["requests"]["waiting"] == 3
    llm.abort(running)
    llm.abort(running + 1)
    requests = llm.metrics()["requests"]
    assert (requests["length"], requests["stop"], requests["aborted"]) == (1, 1, 4)
    at_call(llm._runner.model, 1, fail)  # type: ignore[union-attr]
    with pytest.raises(StepError):
        llm.generate([8, 9], GREEDY, use_tqdm=False)
    assert llm.metrics()["requests"]["aborted"] == 5
    check_sums(llm.metrics())


def test_prefix_cache_and_preemptions(tiny_qwen3: Path, ragged_prompts: list[Ids]) -> None:
    llm = make_paged_llm(tiny_qwen3, num_kvcache_blocks=40)
    prompt = ragged_prompts[-1][:40]
    for _ in range(2):
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    # Even a prompt that is cached whole computes its last token.
    assert llm.metrics()["prefix_cache"] == {"asked": 80, "found": 39, "hit_rate": 39 / 80}
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    llm.generate([p[:20] for p in ragged_prompts], params, use_tqdm=False)
    metrics = llm.metrics()
    check_sums(metrics)
    assert metrics["preemptions"] == llm.scheduler.num_preemptions > 0
    assert metrics["blocks"]["peak"] == 40
    assert metrics["tokens"]["completion"] == 2 + 40 * len(ragged_prompts)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_times_of_requests(
    tiny_qwen3: Path, ragged_prompts: list[Ids], async_scheduling: bool
) -> None:
    llm = make_paged_llm(
        tiny_qwen3,
        async_scheduling=async_scheduling,
        request_metrics=True,
        num_kvcache_blocks=18,
        max_num_seqs=4,
    )
    params = SamplingParams(max_tokens=30, n=3, seed=1)
    outputs = llm.generate([p[:20] for p in ragged_prompts[:8]], params, use_tqdm=False)
    assert llm.metrics()["preemptions"] > 0
    for output in outputs:
        for sample in output["outputs"]:
            times = sample["metrics"]
            assert 0 <= times["queued"] <= times["first_token"] <= times["total"]
            if len(sample["token_ids"]) > 2:
                assert times["first_token"] < times["total"]
    first, last = outputs[0]["metrics"], outputs[-1]["metrics"]
    assert first["total"] < last["queued"], "only four fit at a time"
    assert not llm._metrics._timer._moments, "an ended request is forgotten"  # type: ignore[union-attr]


def test_times_are_optional_and_dropped_requests_forgotten(tiny_qwen3: Path) -> None:
    assert "metrics" not in make_llm(tiny_qwen3).generate([2], SAMPLED, use_tqdm=False)[0]
    llm = make_llm(tiny_qwen3, request_metrics=True)
    for aborted_after in (0, 1, 3):
        llm.add_request([2, 3], SamplingParams(n=4))
        for _ in range(aborted_after):
            llm.step()
        llm.abort(4 * (0, 1, 3).index(aborted_after))
    assert drain(llm) == {}
    assert not llm._metrics._timer._moments  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="request_metrics must be True or False"):
        make_llm(tiny_qwen3, request_metrics=1)


def test_streams_and_steps_are_counted(tiny_qwen3: Path) -> None:
    llm = make_llm(tiny_qwen3)
    stream = llm.stream([[2, 3], [4, 5]], GREEDY)
    next(stream)
    stream.close()
    assert llm.metrics()["requests"]["aborted"] == 2
    llm.add_request([6], GREEDY)
    drain(llm)
    assert llm.metrics()["requests"]["length"] == 1


@pytest.mark.parametrize("config", [{}, {"tensor_parallel_size": 2}])
def test_one_line_at_construction(
    tiny_qwen3: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
) -> None:
    at_info = caplog.at_level(logging.INFO, logger="nanovllm")
    with at_info, make_llm(tiny_qwen3, **config) as llm:
        llm.generate([2, 3], GREEDY, use_tqdm=False)
    (record,) = [r for r in caplog.records if r.name.startswith("nanovllm")]
    assert record.name == "nanovllm"
    assert record.levelno == logging.INFO
    line = record.getMessage()
    for fact in ("cpu", "float32", "512 blocks of 16 tokens", "no CUDA graphs", "ready after"):
        assert fact in line
    assert "backend numba" in line or "backend torch" in line


def test_quiet_by_default(tiny_qwen3: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_llm(tiny_qwen3).generate([2, 3], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("nanovllm").level == logging.NOTSET
    assert not logging.getLogger("nanovllm").handlers


def test_both_ways_to_ask(tiny_qwen3: Path) -> None:
    llm = LLM(str(tiny_qwen3), max_model_len=64, num_kvcache_blocks=8, request_metrics=True)
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SAMPLED, use_tqdm=False)
    assert set(output["metrics"]) == {"queued", "first_token", "total"}


def test_steps_on_a_cpu_are_small_and_none_is_in_vain(tiny_qwen3: Path) -> None:
    """One step ahead would decode once more before it knows that all have stopped."""
    llm = LLM(str(tiny_qwen3), device="cpu", max_model_len=64, num_kvcache_blocks=8)
    assert llm.config.max_num_batched_tokens == 1024
    stop_at_once = SamplingParams(stop_token_ids=list(range(512)))
    llm.generate([[2, 3], [4, 5]], stop_at_once, use_tqdm=False)
    counts = {kind: times["count"] for kind, times in llm.metrics()["steps"].items()}  # type: ignore[index]
    assert counts == {"prefill": 1, "decode": 0, "mixed": 0}
    assert llm.metrics()["requests"]["stop"] == 2
