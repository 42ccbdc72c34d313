"""Tests that a request whose logits are NaN or infinite ends with an error that says where, and
that all others get what they would get without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, NumericalError, SamplingParams
from nanovllm.batch.engines import LocalEngine
from nanovllm.batch.requests import PlainRows, SamplingDefaults
from nanovllm.batch.serving import serve
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import GREEDY, NUM_TOKENS, SIZES, Ids, make_llm, make_paged_llm

BAD_ID = 7  # whose embedding is NaN
PROMPTS: list[Ids] = [[2, 3, 4], [5, BAD_ID, 6], [8, 9], [10, 11, 12, 13, 14, BAD_ID], [15]]
BAD = [1, 3]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "async": ({}, {}),
    "synchronous": ({"async_scheduling": False}, {}),
    "chunked": ({"max_num_batched_tokens": 2}, {}),
    "torch": ({"attention_backend": "torch"}, {}),
    "filtered": ({}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 3}),
    "sampled": ({}, {"temperature": 1.0, "seed": 1}),
    "edited": ({}, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {3: 2.0}}),
    "reported": ({}, {"logprobs": 2, "prompt_logprobs": 1}),
    "samples": ({}, {"n": 3, "temperature": 1.0, "seed": 2}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an untied checkpoint, so that an embedding can be wrong and all logits right."""
    return make_checkpoint(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def broken(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the same with a NaN in the embedding of `BAD_ID`."""

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][BAD_ID, 5] = float("nan")

    return changed(checkpoint, tmp_path_factory.mktemp("broken"), spoil)


def changed(checkpoint: Path, to: Path, change: Any) -> Path:
    for file in checkpoint.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def params_of(case: str) -> SamplingParams:
    wanted = {"temperature": 0} | CASES[case][1]
    # No request draws the id itself: else the broken engine would fail where the right one goes on.
    allowed = [i for i in range(2, 512) if i != BAD_ID]
    keeps = {} if "seed" in wanted else {"allowed_token_ids": allowed}
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **wanted | keeps)


@pytest.mark.parametrize("case", CASES)
def test_bad_requests_among_good_ones(checkpoint: Path, broken: Path, case: str) -> None:
    config = {"device": "auto"} | CASES[case][0]
    params = params_of(case)
    good = [prompt for prompt in PROMPTS if BAD_ID not in prompt]
    with make_llm(checkpoint, **config) as llm:
        expected = llm.generate(list(good), params, use_tqdm=False)
    assert all(BAD_ID not in s["token_ids"] for o in expected for s in o.get("outputs", [o]))
    with make_paged_llm(broken, **config) as llm:
        with pytest.raises(NumericalError) as raised:
            llm.generate(list(PROMPTS), params, use_tqdm=False)
        outputs = raised.value.outputs
        assert [o for i, o in enumerate(outputs) if i not in BAD] == approx(expected)
        for i in BAD:
            for sample in outputs[i].get("outputs", [outputs[i]]):
                assert sample["finish_reason"] == "abort"
                assert sample["token_ids"] == []
                assert f"at position {len(PROMPTS[i])} " in sample["error"]
        message = str(raised.value)
        for word in ("prompt 1 (and 1 more)", "NaN", "position 3", "float32"):
            assert word in message
        assert llm.metrics()["requests"]["failed"] == len(BAD) * params.n
        assert llm.generate(list(good), params, use_tqdm=False) == approx(expected)
        manager = llm.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        manager.check_integrity([])


def approx(outputs: list[Any]) -> list[Any]:
    """Returns the results with their log probabilities rounded by the tolerance of pytest."""
    return [{name: _approx(value) for name, value in output.items()} for output in outputs]


def _approx(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        if "token_ids" in (value[0] or {}):
            return approx(value)
        return [item and pytest.approx(item, abs=1e-4) for item in value]
    return value


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_numbers_that_break_in_the_middle(broken: Path, temperature: float) -> None:
    """The id is drawn, and what comes after it fails; the step in flight then computes on."""
    llm = make_llm(broken, device="auto")
    bias = SamplingParams(temperature=temperature, logit_bias={BAD_ID: 100}, max_tokens=9)
    with pytest.raises(
        NumericalError, match=r"prompt 1: .* at position 3 \(after 2 tokens of the "
    ):
        llm.generate([[2], [3, 4], [5]], [GREEDY, bias, GREEDY], use_tqdm=False)
    with pytest.raises(NumericalError) as raised:
        llm.generate([2, 3], bias, use_tqdm=False)
    assert raised.value.outputs[0]["token_ids"] == [BAD_ID]


def test_two_ranks(checkpoint: Path, broken: Path) -> None:
    good = [prompt for prompt in PROMPTS if BAD_ID not in prompt]
    expected = make_llm(checkpoint).generate(list(good), params_of("async"), use_tqdm=False)
    with make_llm(broken, tensor_parallel_size=2) as llm:
        with pytest.raises(NumericalError) as raised:
            llm.generate(list(PROMPTS), params_of("async"), use_tqdm=False)
        assert [o for i, o in enumerate(raised.value.outputs) if i not in BAD] == expected
        filtered = params_of("filtered")
        with pytest.raises(NumericalError):
            llm.generate(PROMPTS[1], filtered, use_tqdm=False)
        assert llm.generate(list(good), params_of("async"), use_tqdm=False) == expected


def test_step_raises_once_and_keeps_what_ended_with_it(broken: Path) -> None:
    llm = make_llm(broken)
    one = SamplingParams(temperature=0, max_tokens=1)
    ids = [llm.add_request(prompt, one) for prompt in PROMPTS]
    ended, errors = [], []
    while not llm.is_finished():
        try:
            ended += [seq_id for seq_id, _ in llm.step()[0]]
        except NumericalError as error:
            errors.append(str(error))
    assert ended == [ids[i] for i in range(len(PROMPTS)) if i not in BAD]
    (message,) = errors
    assert message.startswith("request 1 (and 1 more): the logits at position 3")


def test_stream(broken: Path) -> None:
    llm = make_llm(broken)
    deltas = []
    with pytest.raises(NumericalError, match="prompt 1"):
        deltas += list(_kept(llm.stream(list(PROMPTS), params_of("async")), deltas))
    reasons = {d["index"]: d["finish_reason"] for d in deltas if d["finish_reason"]}
    assert reasons == {0: "length", 1: "abort", 2: "length", 3: "abort", 4: "length"}


def _kept(stream: Any, deltas: list[Any]) -> Any:
    """Keeps what a stream yields before it raises."""
    for delta in stream:
        deltas.append(delta)
        yield from ()


def test_a_job_makes_error_rows(broken: Path) -> None:
    engine = LocalEngine({"model": str(broken), "device": "cpu", **SIZES})
    form = PlainRows(SamplingDefaults({"max_tokens": 3}, None))
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    served = {s.index: s for s in serve(enumerate(rows), form, engine)}
    assert [i for i, row in sorted(served.items()) if row.is_error] == BAD
    assert "NaN" in str(served[1].row["error"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_that_overflow_in_half_precision(
    checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.v_proj.weight"] *= 1e5

    llm = make_llm(changed(checkpoint, tmp_path, enlarge), dtype=dtype, device="auto")
    if dtype == "bfloat16":
        assert len(llm.generate([2, 3], GREEDY, use_tqdm=False)[0]["token_ids"]) == NUM_TOKENS
        return
    with pytest.raises(NumericalError, match=r"float16.*try dtype='bfloat16' or 'float32'"):
        llm.generate([2, 3], GREEDY, use_tqdm=False)


def test_new_weights_that_are_no_numbers(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, device="auto")
    expected = llm.generate([2, 3], GREEDY, use_tqdm=False)
    weights = load_file(checkpoint / "model.safetensors")
    llm.update_weights((name, weight * float("inf")) for name, weight in weights.items())
    for _ in range(2):
        with pytest.raises(NumericalError, match="the weights are wrong"):
            llm.generate([[2, 3]] * 3, GREEDY, use_tqdm=False)
    llm.update_weights(checkpoint)
    assert llm.generate([2, 3], GREEDY, use_tqdm=False) == expected


def test_an_aborted_request_is_no_failure(tiny_qwen3: Path) -> None:
    llm: LLM = make_llm(tiny_qwen3)
    llm.abort(llm.add_request([2, 3], GREEDY))
    assert llm.metrics()["requests"]["failed"] == 0
