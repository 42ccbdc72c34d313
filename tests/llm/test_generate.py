"""Tests what a user sees of `LLM`: forms of input, order of results, ends of completions, the step
loop, and what an engine leaves behind."""

import copy
import gc
import random
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from tests.helpers.checkpoints import edit_json, make_checkpoint
from tests.helpers.engines import (
    GREEDY,
    NUM_TOKENS,
    SAMPLED,
    Ids,
    drain,
    greedy_ids,
    make_paged_llm,
    sampled_ids,
)

TEXT = "introduce yourself"


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> LLM:
    return make_paged_llm(tiny_qwen3)


def test_home_is_expanded(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_qwen3.parent))
    assert make_paged_llm(Path("~") / tiny_qwen3.name).config.model == str(tiny_qwen3)


def test_results_come_in_the_order_of_the_prompts(
    tiny_qwen3: Path, prompts: list[Ids], hf_ids: list[Ids]
) -> None:
    lens = [12, 3, 1, 7, 2, 10]  # of two running requests, the later one often ends first
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens]
    outputs = make_paged_llm(tiny_qwen3, max_num_seqs=2).generate(prompts, params, use_tqdm=False)
    assert [out["token_ids"] for out in outputs] == [
        ids[:n] for ids, n in zip(hf_ids, lens, strict=True)
    ]
    assert {out["finish_reason"] for out in outputs} == {"length"}


def test_forms_of_prompts(llm: LLM, prompts: list[Ids], hf_ids: list[Ids]) -> None:
    assert llm.tokenizer is not None
    text_ids = llm.tokenizer.encode(TEXT)
    (from_ids,) = llm.generate(text_ids, GREEDY, use_tqdm=False)
    (from_text,) = llm.generate(TEXT, GREEDY, use_tqdm=False)
    batch: list[str | Ids] = [prompts[0], TEXT, prompts[1]]
    mixed = llm.generate(batch, GREEDY, use_tqdm=False)
    assert from_text == from_ids == mixed[1]
    assert from_text["text"] == llm.tokenizer.decode(from_text["token_ids"]) != ""
    assert [mixed[0]["token_ids"], mixed[2]["token_ids"]] == hf_ids[:2]
    assert from_text["prompt_token_ids"] == text_ids
    assert set(from_text) == {
        "text", "token_ids", "finish_reason", "stop_reason", "prompt_token_ids"
    }  # fmt: skip
    assert llm.generate([], GREEDY, use_tqdm=False) == llm.generate([], []) == []
    (default,) = llm.generate([5, 6, 7], use_tqdm=False)
    assert len(default["token_ids"]) == 64 - 3 or default["token_ids"][-1] == 1


def test_max_model_len_ends_with_length(tiny_qwen3: Path, prompts: list[Ids]) -> None:
    llm = make_paged_llm(tiny_qwen3, max_model_len=16, num_kvcache_blocks=4)
    batch = [(prompts[0] * 20)[:n] for n in (15, 14, 1)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate(batch, params, use_tqdm=False)
    assert [len(out["token_ids"]) for out in outputs] == [1, 2, 15]
    assert {out["finish_reason"] for out in outputs} == {"length"}


@pytest.mark.parametrize(
    "source", ["config", "config list", "generation_config", "tokenizer_config"]
)
def test_each_source_of_stop_ids_counts(
    tiny_qwen3: Path, tmp_path: Path, source: str, llm: LLM
) -> None:
    free = llm.generate(TEXT, GREEDY, use_tqdm=False)[0]["token_ids"]
    stop = free[4]
    expected = free[: free.index(stop) + 1]
    checkpoint = Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))
    token = AutoTokenizer.from_pretrained(tiny_qwen3).convert_ids_to_tokens(stop)
    changes: dict[str, dict[str, Any]] = {
        "config": {"eos_token_id": stop},
        "config list": {"eos_token_id": [2, stop]},
        "generation_config": {"eos_token_id": [2, stop]},
        "tokenizer_config": {"eos_token": token},
    }
    edit_json(checkpoint / f"{source.split()[0]}.json", **changes[source])
    stopping = make_paged_llm(checkpoint)
    assert stopping.tokenizer is not None
    # In the second round the stop token is also the last one that fits.
    for max_tokens in (NUM_TOKENS, len(expected)):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        (output,) = stopping.generate(TEXT, params, use_tqdm=False)
        assert output["token_ids"] == expected
        assert output["text"] == stopping.tokenizer.decode(expected)
        assert output["finish_reason"] == "stop"
    ignoring = stopping.generate(TEXT, GREEDY, use_tqdm=False)[0]
    assert (ignoring["token_ids"], ignoring["finish_reason"]) == (free, "length")


def test_checkpoint_without_stop_ids(tiny_qwen3: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))
    for name in ("config", "generation_config", "tokenizer_config"):
        edit_json(checkpoint / f"{name}.json", eos_token_id=None, eos_token=None)
    params = SamplingParams(temperature=1, max_tokens=60)
    (output,) = make_paged_llm(checkpoint).generate([5, 6], params, use_tqdm=False)
    assert (len(output["token_ids"]), output["finish_reason"]) == (60, "length")


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_step_loop(
    tiny_qwen3: Path, prompts: list[Ids], hf_ids: list[Ids], async_scheduling: bool
) -> None:
    llm = make_paged_llm(
        tiny_qwen3,
        enable_prefix_caching=False,
        max_num_batched_tokens=16,
        async_scheduling=async_scheduling,
    )
    assert llm.is_finished()
    assert llm.step() == ([], 0)
    seq_ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    assert not llm.is_finished()
    ids: dict[int, Ids] = {}
    nums_tokens = []
    while not llm.is_finished():
        finished, num_tokens = llm.step()
        assert not ids.keys() & dict(finished).keys(), "returned twice"
        ids.update(finished)
        nums_tokens.append(num_tokens)
    assert llm.step() == ([], 0)
    assert [ids[seq_id] for seq_id in seq_ids] == hf_ids
    prefilled = [n for n in nums_tokens if n > 0]
    assert sum(prefilled) == sum(map(len, prompts))
    assert max(prefilled) <= 16
    # The prefill of each prompt samples its first token; steps that prefill may decode as well.
    num_decoded = [-n for n in nums_tokens if n < 0]
    assert max(num_decoded) <= len(prompts)
    assert NUM_TOKENS - 1 <= sum(num_decoded) < len(prompts) * (NUM_TOKENS - 1)


@pytest.mark.parametrize(("async_scheduling", "num_beyond"), [("auto", 0), (True, 1)])
def test_tokens_computed_beyond_a_stop(
    tiny_qwen3: Path, hf_ids: list[Ids], prompts: list[Ids], async_scheduling: Any, num_beyond: int
) -> None:
    """One step late, the host sees a stop when the next token is being computed; by default, the
    host of a CPU is not late."""
    llm = make_paged_llm(tiny_qwen3, async_scheduling=async_scheduling)
    stop = hf_ids[0][5]
    seq_id = llm.add_request(prompts[0], replace(GREEDY, stop_token_ids=[stop]))
    llm.add_request(prompts[1], GREEDY)  # keeps the engine busy
    num_decoded = 0
    schedule = llm.scheduler.schedule

    def counted() -> Any:
        nonlocal num_decoded
        batch = schedule()
        if batch is not None and batch.decode is not None:
            num_decoded += seq_id in batch.decode.seq_ids
        return batch

    llm.scheduler.schedule = counted  # type: ignore[method-assign]
    num_kept = len(drain(llm)[seq_id])
    assert num_kept == hf_ids[0].index(stop) + 1
    assert num_decoded == num_kept - 1 + num_beyond, "the prompt's step samples the first token"


def test_texts_are_made_while_the_device_works(
    tiny_qwen3: Path, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_paged_llm(tiny_qwen3)
    assert llm._decoder is not None
    decode, nums_in_flight = llm._decoder.decode, list[int]()

    def watched(*args: Any) -> str:
        nums_in_flight.append(len(llm._in_flight))
        return decode(*args)

    monkeypatch.setattr(llm._decoder, "decode", watched)
    params = [replace(GREEDY, max_tokens=n) for n in (2, 4, 4, 9)]
    outputs = llm.generate(prompts[:4], params, use_tqdm=False)
    assert all(output["text"] for output in outputs)
    assert nums_in_flight == [1, 1, 1, 0], "no step follows the last"


def test_generate_serves_pending_requests_and_keeps_their_results(
    llm: LLM, prompts: list[Ids], hf_ids: list[Ids]
) -> None:
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    first, second = llm.add_request(prompts[0], short), llm.add_request(prompts[1], GREEDY)
    assert llm.generate([]) == []
    assert greedy_ids(llm, prompts[2:4], 6) == [ids[:6] for ids in hf_ids[2:4]]
    assert not llm.is_finished()
    assert drain(llm) == {first: hf_ids[0][:2], second: hf_ids[1]}


def test_two_engines_at_once(tiny_qwen3: Path, tmp_path: Path, prompts: list[Ids]) -> None:
    paths = [tiny_qwen3, make_checkpoint(tmp_path, seed=1)]
    alone = [sampled_ids(make_paged_llm(path), prompts, SAMPLED) for path in paths]
    engines = [make_paged_llm(path) for path in paths]
    together: list[dict[int, Ids]] = [{}, {}]
    for engine in engines:
        for prompt in prompts:
            engine.add_request(prompt, SAMPLED)
    while not all(engine.is_finished() for engine in engines):
        for engine, ids in zip(engines, together, strict=True):
            ids.update(engine.step()[0])
    assert [[ids[i] for i in sorted(ids)] for ids in together] == alone
    assert alone[0] != alone[1]


def test_exit_and_del_free_everything(tiny_qwen3: Path) -> None:
    def used(llm: LLM) -> weakref.ref[Any]:
        llm.generate([TEXT, TEXT], SAMPLED, use_tqdm=False)
        assert llm._runner is not None
        return weakref.ref(llm._runner.model.lm_head.weight)

    gc.disable()  # no object may wait for the cycle collector to be freed
    try:
        with make_paged_llm(tiny_qwen3) as closed:
            weight = used(closed)
            assert weight() is not None
        assert weight() is None
        closed.exit()
        with pytest.raises(RuntimeError, match="exit"):
            closed.step()
        llm = make_paged_llm(tiny_qwen3)
        weight, engine = used(llm), weakref.ref(llm)
        del llm
        assert (weight(), engine()) == (None, None)
    finally:
        gc.enable()


def test_arguments_and_global_state_are_left_alone(tiny_qwen3: Path, prompts: list[Ids]) -> None:
    def state() -> list[Any]:
        rngs = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
        flags = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        return [*rngs, *flags, torch.get_default_dtype(), torch.get_default_device()]

    before = state()
    batch, params = copy.deepcopy(prompts[:2]), [SAMPLED, GREEDY]
    make_paged_llm(tiny_qwen3, dtype="bfloat16").generate(batch, params, use_tqdm=False)
    assert (batch, params) == (prompts[:2], [SAMPLED, GREEDY])
    assert state() == before
    with pytest.raises(ValueError, match="cannot hold"):
        make_paged_llm(tiny_qwen3, dtype="bfloat16", num_kvcache_blocks=1)
    assert state() == before


def test_checkpoint_without_tokenizer(tmp_path: Path, llm: LLM, prompts: list[Ids]) -> None:
    bare = make_paged_llm(make_checkpoint(tmp_path, with_tokenizer=False))
    batch: list[str | Ids] = [prompts[0], TEXT]
    with pytest.raises(ValueError, match=r"^prompt 1 is text, but .* no tokenizer; pass token ids"):
        bare.generate(batch)
    outputs = bare.generate(prompts, GREEDY, use_tqdm=False)
    assert [out["token_ids"] for out in outputs] == greedy_ids(llm, prompts, NUM_TOKENS)
    assert {out["text"] for out in outputs} == {""}


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT, TEXT], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate([TEXT, TEXT], GREEDY)
    bar = capsys.readouterr().err
    assert all(part in bar for part in ("2/2", "Prefill=", "Decode=", "tok/s"))
