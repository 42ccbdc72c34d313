"""Tests several samples of one prompt: each equals a request of its own, and the prompt is computed
once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, sample_seed
from tests.helpers.engines import Ids, computed_tokens, drain, make_paged_llm
from tests.helpers.faults import StepError, at_call, fail

N = 4
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=14, ignore_eos=True)
SAMPLES = replace(SEEDED, n=N)
LENGTHS = [1, 3, 4, 5, 8, 9, 31]  # blocks have 4 tokens
PROMPTS = [[(7 * i + n) % 500 for i in range(n)] for n in LENGTHS]


def own_requests() -> list[SamplingParams]:
    return [replace(SEEDED, seed=sample_seed(7, i)) for i in range(N)]


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path) -> list[list[Ids]]:
    """Returns the ids of requests of their own, for each prompt."""
    llm = make_paged_llm(tiny_qwen3, enable_prefix_caching=False, async_scheduling=False)
    return [
        [out["token_ids"] for out in llm.generate([prompt] * N, own_requests(), use_tqdm=False)]
        for prompt in PROMPTS
    ]


def samples_of(llm: LLM, prompts: list[Ids], params: SamplingParams = SAMPLES) -> list[list[Ids]]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [[sample["token_ids"] for sample in output["outputs"]] for output in outputs]


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "synchronous": {"async_scheduling": False},
    "uncached": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 5},
    "preempting": {"num_kvcache_blocks": 30},
    "pool of one request": {"num_kvcache_blocks": 16},
    "pool of one request, uncached": {"num_kvcache_blocks": 16, "enable_prefix_caching": False},
    "fewer rows than samples": {"max_num_seqs": 3},
    "one row": {"max_num_seqs": 1},
    "blocks of one token": {"kvcache_block_size": 1, "num_kvcache_blocks": 200},
    "blocks of 64": {"kvcache_block_size": 64},
    "two ranks": {"tensor_parallel_size": 2, "num_kvcache_blocks": 40},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_samples_equal_requests_of_their_own(
    tiny_qwen3: Path, expected: list[list[Ids]], config: str
) -> None:
    with make_paged_llm(tiny_qwen3, **CONFIGS[config]) as llm:
        llm.scheduler.reserved_tokens = 0
        assert samples_of(llm, PROMPTS) == expected
        assert samples_of(llm, PROMPTS[::-1]) == expected[::-1], "with a warm cache"
        assert llm.scheduler.num_preemptions or config not in ("preempting", "pool of one request")
        manager = llm.scheduler.block_manager
        manager.check_integrity([])
        assert manager.num_free_blocks == manager.num_blocks


RICH: dict[str, dict[str, Any]] = {
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias and allowed ids": {"logit_bias": {7: 3.0}, "allowed_token_ids": range(2, 300)},
    "log probabilities": {"logprobs": 2, "prompt_logprobs": 3},
    "stops": {"stop": ["a", "e"], "min_tokens": 5, "ignore_eos": False},
}
KINDS = [{}, {"max_num_seqs": 3, "num_kvcache_blocks": 16}, {"max_num_batched_tokens": 5}]


@pytest.mark.parametrize("rich", RICH)
@pytest.mark.parametrize("config", KINDS, ids=["plain", "tight", "chunked"])
def test_samples_of_every_kind_equal_requests_of_their_own(
    tiny_qwen3: Path, rich: str, config: dict[str, Any]
) -> None:
    params = replace(SAMPLES, **RICH[rich])
    prompts = PROMPTS[2:6]
    whole = make_paged_llm(tiny_qwen3, **config).generate(list(prompts), params, use_tqdm=False)
    llm = make_paged_llm(tiny_qwen3)
    for prompt, output in zip(prompts, whole, strict=True):
        own = [replace(params, n=1, seed=sample_seed(7, i)) for i in range(N)]
        expected = llm.generate([prompt] * N, own, use_tqdm=False)
        for sample, alone in zip(output["outputs"], expected, strict=True):
            assert sample.keys() == alone.keys()
            for key in ("text", "token_ids", "finish_reason", "stop_reason"):
                assert sample[key] == alone[key]
            for key in ("logprobs", "prompt_logprobs"):
                pairs = zip(sample.get(key, ()), alone.get(key, ()), strict=True)
                for reported, wanted in pairs:
                    assert reported == (wanted and pytest.approx(wanted, abs=1e-4))


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_prompt_is_computed_once(tiny_qwen3: Path, length: int, caches: bool) -> None:
    llm = make_paged_llm(tiny_qwen3, enable_prefix_caching=caches)
    llm.add_request(PROMPTS[LENGTHS.index(length)], SAMPLES)
    assert computed_tokens(llm) == length


def test_full_blocks_are_shared_and_the_partial_one_is_copied(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3, enable_prefix_caching=False)
    llm.add_request(PROMPTS[-1], SAMPLES)  # of 31 tokens
    llm.step()
    tables = [seq.block_table for seq in llm.scheduler.running.values()]
    assert [table[:7] for table in tables] == [tables[0][:7]] * N
    assert len({table[7] for table in tables}) == N
    drain(llm)


def test_results_hold_all_samples(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    (output,) = llm.generate([PROMPTS[1]], SAMPLES, use_tqdm=False)
    samples = output["outputs"]
    assert len(samples) == N
    assert {key: value for key, value in output.items() if key != "outputs"} == samples[0]
    assert len({tuple(sample["token_ids"]) for sample in samples}) == N
    for sample in samples:
        (alone,) = llm.generate([PROMPTS[1]], own_requests()[samples.index(sample)], use_tqdm=False)
        assert sample == alone
        assert "outputs" not in alone


def test_samples_without_a_seed_differ_and_repeat_in_a_new_engine(tiny_qwen3: Path) -> None:
    params = replace(SAMPLES, seed=None)
    runs = [samples_of(make_paged_llm(tiny_qwen3), [PROMPTS[2]] * 2, params) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(ids) for samples in runs[0] for ids in samples}) == 2 * N
    alone = make_paged_llm(tiny_qwen3).generate([PROMPTS[2]], replace(params, n=1), use_tqdm=False)
    assert alone[0]["token_ids"] == runs[0][0][0]


def test_samples_end_on_their_own(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    (free,) = samples_of(llm, [PROMPTS[3]])
    stop = free[2][4]
    params = replace(SAMPLES, stop_token_ids=[stop])
    (output,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
    for sample, ids in zip(output["outputs"], free, strict=True):
        end = ids.index(stop) + 1 if stop in ids else len(ids)
        assert sample["token_ids"] == ids[:end]
        assert sample["finish_reason"] == ("stop" if stop in ids else "length")


def test_step_returns_each_sample_and_abort_drops_all(
    tiny_qwen3: Path, expected: list[list[Ids]]
) -> None:
    llm = make_paged_llm(tiny_qwen3)
    first = llm.add_request(PROMPTS[0], SAMPLES)
    waiting = llm.add_request(PROMPTS[1], SAMPLES)
    running = llm.add_request(PROMPTS[2], SAMPLES)
    last = llm.add_request(PROMPTS[3], SEEDED)
    llm.abort(waiting)
    llm.step()
    llm.step()
    llm.abort(running)
    ended = drain(llm)
    assert ended == {first + i: expected[0][i] for i in range(N)} | {last: expected[3][0]}
    llm.abort(first)  # has ended: nothing happens
    assert llm.is_finished()
    assert llm.scheduler.num_residents == 0


def test_abort_when_the_first_sample_has_ended(tiny_qwen3: Path) -> None:
    llm = make_paged_llm(tiny_qwen3)
    (free,) = samples_of(llm, [PROMPTS[3]])
    seq_id = llm.add_request(PROMPTS[3], replace(SAMPLES, stop_token_ids=[free[0][0]]))
    ended: dict[int, Ids] = {}
    while seq_id not in ended:
        ended.update(llm.step()[0])
    llm.abort(seq_id)
    assert llm.is_finished()
    assert llm.scheduler.num_residents == 0


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_step_that_raises_costs_no_sample_of_others(
    tiny_qwen3: Path, expected: list[list[Ids]], number: int
) -> None:
    llm = make_paged_llm(tiny_qwen3)
    assert llm._runner is not None
    seq_id = llm.add_request(PROMPTS[5], SAMPLES)
    at_call(llm._runner.model, number, fail)
    with pytest.raises(StepError):
        llm.generate(list(PROMPTS[:3]), SAMPLES, use_tqdm=False)
    assert drain(llm) == {seq_id + i: expected[5][i] for i in range(N)}
    llm.scheduler.block_manager.check_integrity([])


def test_seeds_of_samples() -> None:
    assert sample_seed(5, 0) == 5
    seeds = [sample_seed(seed, i) for seed in (0, 1, 2**64 - 1) for i in range(50)]
    assert len(set(seeds)) == 150
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [{}, {"enforce_eager": True}, {"attention_backend": "torch"}, {"dtype": "bfloat16"}]
)
def test_samples_on_a_gpu(tiny_qwen3: Path, config: dict[str, Any]) -> None:
    """Prefills of few samples are CUDA graphs, those of more samples than a graph has room for are
    not. In half precision the first tokens are compared: later ones may come from other batches."""
    many = replace(SAMPLES, n=100)
    sizes = {"max_num_seqs": 128, "num_kvcache_blocks": 2048, "kvcache_block_size": 16}
    with make_paged_llm(tiny_qwen3, device="cuda", **(sizes | config)) as llm:
        llm.add_request(PROMPTS[-1], many)
        assert computed_tokens(llm) == len(PROMPTS[-1])
        llm.reset_prefix_cache()
        samples = samples_of(llm, PROMPTS[-2:], SAMPLES)
        (first_of_many, *_) = samples_of(llm, PROMPTS[-1:], many)
        own = [
            llm.generate([prompt] * N, own_requests(), use_tqdm=False) for prompt in PROMPTS[-2:]
        ]
        expected = [[out["token_ids"] for out in outputs] for outputs in own]
    num = 1 if "dtype" in config else SEEDED.max_tokens
    assert [[ids[:num] for ids in part] for part in samples] == [
        [ids[:num] for ids in part] for part in expected
    ]
    assert [ids[:num] for ids in first_of_many[:N]] == [ids[:num] for ids in expected[1]]
