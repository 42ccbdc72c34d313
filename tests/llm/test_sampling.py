"""Tests of requests that want more than plain sampling, through the whole engine.

What one gets does not depend on its neighbours, chunks, preemption, overlap or the number of ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.helpers.engines import Ids, make_llm, make_paged_llm, sampled_ids
from tests.helpers.reference import HuggingFace

NUM_TOKENS = 40
SIZES = {"max_model_len": 96, "kvcache_block_size": 4, "num_kvcache_blocks": 400}
WANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": 3, "top_p": 0.9},
    {"top_p": 0.5, "logprobs": 3},
    {"min_p": 0.1, "top_k": 40, "prompt_logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.8, "logprobs": 0},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"presence_penalty": -1.5, "top_k": 5, "logprobs": 20, "prompt_logprobs": 0},
    {"allowed_token_ids": [5, 6, 7, 8, 400], "repetition_penalty": 1.3},
    {"logit_bias": {9: 6.0, 10: 6.0, 11: -100}, "logprobs": 1},
    {"logit_bias": {1: 30.0}, "min_tokens": 4, "stop_token_ids": [1]},
]


def all_params() -> list[SamplingParams]:
    return [
        SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": i} | want))
        for i, want in enumerate(WANTS)
    ]


Result = tuple[Ids, Any, Any]


def results(llm: LLM, prompts: list[Ids], params: list[SamplingParams]) -> list[Result]:
    """Returns ids, log probabilities and those of the prompt of each request, in order."""
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [(o["token_ids"], o.get("logprobs"), o.get("prompt_logprobs")) for o in outputs]


def assert_same(some: list[Result], others: list[Result]) -> None:
    """Asserts equal ids, and log probabilities that differ by the rounding of a batch's matmuls."""
    for (ids, *reports), (other_ids, *other_reports) in zip(some, others, strict=True):
        assert ids == other_ids
        for report, other in zip(reports, other_reports, strict=True):
            assert (report is None) == (other is None)
            for one, another in zip(report or [], other or [], strict=True):
                if one is None or another is None:
                    assert one is another
                    continue
                assert list(one) == list(another)
                assert list(one.values()) == pytest.approx(list(another.values()), abs=1e-4)


@pytest.fixture(scope="module")
def prompts(ragged_prompts: list[Ids]) -> list[Ids]:
    shared = ragged_prompts[0][:20]
    return [shared + prompt[:20] for prompt in ragged_prompts[1 : 1 + len(WANTS)]]


@pytest.fixture(scope="module")
def alone(tiny_qwen3: Path, prompts: list[Ids]) -> list[Result]:
    """Each request by itself, in an engine without cache and overlap."""
    llm = make_llm(tiny_qwen3, **SIZES, enable_prefix_caching=False, async_scheduling=False)
    pairs = zip(prompts, all_params(), strict=True)
    return [results(llm, [prompt], [params])[0] for prompt, params in pairs]


def test_each_parameter_changes_its_request(alone: list[Result], prompts: list[Ids]) -> None:
    for i, (want, (ids, logprobs, prompt_logprobs)) in enumerate(zip(WANTS, alone, strict=True)):
        assert (logprobs is None) == ("logprobs" not in want)
        assert (prompt_logprobs is None) == ("prompt_logprobs" not in want)
        if logprobs is not None:
            assert len(logprobs) == len(ids)
            assert [next(iter(one)) for one in logprobs] == ids
            assert {len(one) - want["logprobs"] for one in logprobs} <= {0, 1}
        if prompt_logprobs is not None:
            assert [None, *prompts[i][1:]] == [one and next(iter(one)) for one in prompt_logprobs]
    assert set(alone[8][0]) <= {5, 6, 7, 8, 400}
    assert set(alone[9][0]) & {9, 10}
    assert 1 not in alone[10][0][:4]
    assert 1 in alone[10][0]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 13},
        {"num_kvcache_blocks": 30, "max_num_batched_tokens": 17},
        {"max_num_seqs": 3},
    ],
    ids=str,
)
def test_a_mixed_batch_equals_each_row_alone(
    config: dict[str, Any], tiny_qwen3: Path, prompts: list[Ids], alone: list[Result]
) -> None:
    llm = make_llm(tiny_qwen3, **(SIZES | config))
    assert_same(results(llm, prompts, all_params()), alone)
    assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in config)
    assert_same(results(llm, prompts[::-1], all_params()[::-1]), alone[::-1])  # from the cache


def test_two_ranks_equal_one(tiny_qwen3: Path, prompts: list[Ids], alone: list[Result]) -> None:
    with make_llm(tiny_qwen3, **SIZES, tensor_parallel_size=2) as llm:
        assert_same(results(llm, prompts, all_params()), alone)


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_gpu_equals_the_cpu(
    enforce_eager: bool, tiny_qwen3: Path, prompts: list[Ids], alone: list[Result]
) -> None:
    with make_llm(tiny_qwen3, **SIZES, device="cuda", enforce_eager=enforce_eager) as llm:
        assert_same(results(llm, prompts, all_params()), alone)
        assert_same(results(llm, prompts, all_params()), alone)


def test_rows_are_plain_again_after_a_special_request(tiny_qwen3: Path) -> None:
    llm = make_llm(tiny_qwen3, max_num_seqs=1)
    plain = SamplingParams(max_tokens=6, ignore_eos=True, seed=5)
    expected = sampled_ids(llm, [[4, 5, 6]], plain)
    only = SamplingParams(max_tokens=6, ignore_eos=True, allowed_token_ids=[9], logprobs=1)
    assert sampled_ids(llm, [[4, 5, 6]], only) == [[9] * 6]
    assert sampled_ids(llm, [[4, 5, 6]], plain) == expected


def test_log_probabilities_equal_hugging_face(tiny_qwen3: Path, prompts: list[Ids]) -> None:
    """Those of prompts too, with a cached prefix and with chunks, and whatever the filters."""
    reference = HuggingFace(tiny_qwen3)
    llm = make_paged_llm(tiny_qwen3, max_num_batched_tokens=24)
    params = SamplingParams(
        temperature=0.7, top_k=4, max_tokens=9, ignore_eos=True, logprobs=5, prompt_logprobs=3,
        repetition_penalty=1.4, logit_bias={3: 2.0},
    )  # fmt: skip
    for prompt in (prompts[0], prompts[0], prompts[1]):
        ((ids, logprobs, prompt_logprobs),) = results(llm, [prompt], [params])
        with torch.inference_mode():
            logits = reference.model(torch.tensor([prompt + ids])).logits[0, :-1]
        truth = logits.log_softmax(dim=-1)
        found = [(one, 3) for one in prompt_logprobs[1:]] + [(one, 5) for one in logprobs]
        assert prompt_logprobs[0] is None
        for row, token_id, (one, num_top) in zip(truth, (prompt + ids)[1:], found, strict=True):
            best = row.topk(num_top).indices.tolist()
            assert list(one) == [token_id] + [i for i in best if i != token_id]
            assert list(one.values()) == pytest.approx(row[list(one)].tolist(), abs=1e-4)


def test_penalties_see_every_token_before(tiny_qwen3: Path) -> None:
    """A greedy request whose penalty forbids repeats never repeats a token, with overlap."""
    llm = make_llm(tiny_qwen3)
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1e5, presence_penalty=2
    )
    prompt = [7, 8, 9, 10]
    ids = sampled_ids(llm, [prompt] * 3, params)
    assert ids[0] == ids[1] == ids[2]
    assert len({*prompt, *ids[0]}) == 4 + 40


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_penalties_of_a_request_that_fills_its_row(device: str, tiny_qwen3: Path) -> None:
    """Warm-up steps and the last token lie at the end of the row's history."""
    sizes = {"max_model_len": 8, "kvcache_block_size": 4, "num_kvcache_blocks": 8}
    with make_llm(tiny_qwen3, **sizes, device=device) as llm:
        params = SamplingParams(max_tokens=99, ignore_eos=True, presence_penalty=2, logprobs=1)
        ((ids, logprobs, _),) = results(llm, [[3, 4, 5]], [params])
    assert len(ids) == len(logprobs) == 5
