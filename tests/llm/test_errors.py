"""Tests every error that a user can cause: its type, that its message has the bad value and the
fix, and that the engine has queued nothing and goes on serving."""

import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from tests.helpers.checkpoints import VOCAB_SIZE
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.reference import HuggingFace

SIZES = {"max_model_len": 64, "num_kvcache_blocks": 9}
GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT = [7, 8, 9]

BAD_PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "empty text": ("", ValueError, "is empty.*at least one token"),
    "no ids": ([], ValueError, "is empty.*at least one token"),
    "long": ([2] * 64, ValueError, "has 64 tokens.*max_model_len=64.*shorten it"),
    "id too large": ([2, VOCAB_SIZE], ValueError, "token id 512 at index 1.*ids 0 to 511"),
    "id of 65 bits": ([2, 2**64], ValueError, f"token id {2**64} at index 1.*ids 0 to 511"),
    "negative id": ([-1], ValueError, "token id -1 at index 0.*ids 0 to 511"),
    "float id": ([2, 3.0], TypeError, r"3\.0 at index 1.*ints"),
    "bool id": ([True], TypeError, "True at index 0.*ints"),
    "str id": ([2, "a"], TypeError, "'a' at index 1.*ints"),
    "numpy id": ([np.int64(3)], TypeError, "3.* at index 0.*ints"),
    "int": (5, TypeError, "a str or a list of token ids, got 5"),
    "bytes": (b"a", TypeError, "a str or a list of token ids, got b'a'"),
    "set": ({2, 3}, TypeError, r"a str or a list of token ids, got \{2, 3\}"),
    "array of floats": (np.array([2.0]), TypeError, "integers as token ids, got float64"),
    "tensor of bools": (torch.tensor([True]), TypeError, "integers as token ids, got torch.bool"),
    "matrix": (np.array([[2], [3]]), ValueError, r"the shape \(2, 1\).*one-dimensional"),
    "empty tensor": (torch.tensor([]), ValueError, "is empty.*at least one token"),
    "array with a large id": (np.array([2, 600]), ValueError, "token id 600 at index 1"),
    "array of 64 bits": (np.array([2**64 - 1], np.uint64), ValueError, "token id 1844674407370955"),
    "dict without prompt": ({"text": "a"}, TypeError, "'prompt' or 'prompt_token_ids', got {'text"),
    "dict with both": ({"prompt": "a", "prompt_token_ids": [2]}, TypeError, "either 'prompt' or"),
    "dict with ids as text": ({"prompt": [2]}, TypeError, r"a str as 'prompt', got \[2\]"),
    "dict with text as ids": ({"prompt_token_ids": "a"}, TypeError, "ids as 'prompt_token_ids'"),
    "surrogate": ("x \ud83d", ValueError, r"'\\ud83d', half of a surrogate pair, at index 2"),
}
Case = tuple[str, Any, type[Exception], str]
BAD_CONFIGS: list[Case] = [
    ("max_num_batched_tokens", 0, ValueError, ">= 1"),
    ("max_num_seqs", 0, ValueError, ">= 1"),
    ("max_num_seqs", 70_000, ValueError, "at most 65535.*lower it"),
    ("max_num_seqs", 4.0, TypeError, "an int"),
    ("max_num_seqs", True, TypeError, "an int"),
    ("max_model_len", 1, ValueError, ">= 2"),
    ("max_model_len", 2**40, ValueError, "at most 2147483647"),
    ("max_model_len", "4096", TypeError, "an int"),
    ("gpu_memory_utilization", 0, ValueError, r"in \(0, 1\]"),
    ("gpu_memory_utilization", 1.5, ValueError, r"in \(0, 1\]"),
    ("gpu_memory_utilization", float("nan"), ValueError, r"in \(0, 1\]"),
    ("gpu_memory_utilization", "0.9", TypeError, "a number"),
    ("tensor_parallel_size", 0, ValueError, r"in \[1, 8\]"),
    ("tensor_parallel_size", 9, ValueError, r"in \[1, 8\]"),
    ("enforce_eager", 1, TypeError, "True or False"),
    ("enable_prefix_caching", "yes", TypeError, "True or False"),
    ("async_scheduling", None, TypeError, "True or False"),
    ("kvcache_block_size", 0, ValueError, ">= 1"),
    ("kvcache_block_size", 24, ValueError, "power of two"),
    ("kvcache_block_size", 16.0, TypeError, "an int"),
    ("num_kvcache_blocks", 0, ValueError, ">= 1, or -1"),
    ("num_kvcache_blocks", -2, ValueError, "-1"),
    ("num_kvcache_blocks", None, TypeError, "an int"),
    ("device", "tpu", ValueError, "'auto'.*'cpu'"),
    ("device", "cuda:99", ValueError, "GPU"),
    ("dtype", "int8", ValueError, "'auto'.*float32.*bfloat16"),
    ("dtype", None, ValueError, "'auto'.*float32.*bfloat16"),
    ("attention_backend", "xformers", ValueError, "'auto'.*torch"),
    ("attention_backend", "triton", ValueError, "needs a CUDA GPU.*use 'torch'"),
    ("seed", -1, ValueError, r"in \[0, "),
    ("seed", 2**64, ValueError, r"in \[0, "),
    ("seed", 0.5, TypeError, "an int"),
]
BAD_SAMPLING: list[Case] = [
    ("temperature", -1, ValueError, ">= 0.*got -1"),
    ("temperature", float("nan"), ValueError, "finite.*got nan"),
    ("temperature", float("inf"), ValueError, "finite.*got inf"),
    ("temperature", 10**400, ValueError, "finite"),
    ("temperature", 1e-38, ValueError, "0 .greedy. or at least 1e-05, got 1e-38"),
    ("temperature", "0.6", TypeError, "a number, got '0.6'"),
    ("temperature", True, TypeError, "a number, got True"),
    ("max_tokens", 0, ValueError, ">= 1, got 0"),
    ("max_tokens", -1, ValueError, ">= 1, got -1"),
    ("max_tokens", 1.5, TypeError, r"an int, got 1\.5"),
    ("max_tokens", True, TypeError, "an int, got True"),
    ("ignore_eos", 1, TypeError, "True or False, got 1"),
    ("seed", -1, ValueError, r"\[0, 2\*\*64\), got -1"),
    ("seed", 2**64, ValueError, r"\[0, 2\*\*64\), got 18446744073709551616"),
    ("seed", 1.0, TypeError, r"an int or None, got 1\.0"),
    ("n", 0, ValueError, ">= 1, got 0"),
    ("n", None, TypeError, "an int, got None"),
    ("top_k", -2, ValueError, ">= -1, got -2"),
    ("top_k", 2.0, TypeError, r"an int, got 2\.0"),
    ("top_p", 0, ValueError, r"in \(0, 1\], got 0"),
    ("top_p", -0.5, ValueError, r"in \[0, 1\], got -0\.5"),
    ("top_p", 1.01, ValueError, r"1\], got 1\.01"),
    ("top_p", float("nan"), ValueError, "got nan"),
    ("top_p", "1", TypeError, "a number, got '1'"),
    ("min_p", -0.1, ValueError, r"in \[0, 1\], got -0\.1"),
    ("min_p", 1.5, ValueError, r"in \[0, 1\], got 1\.5"),
    ("min_p", None, TypeError, "a number, got None"),
    ("min_tokens", -1, ValueError, ">= 0, got -1"),
    ("min_tokens", 65, ValueError, "at most max_tokens=64, got 65"),
    ("min_tokens", 1.0, TypeError, "an int"),
    ("stop", "", ValueError, "at least one character, got ''"),
    ("stop", ["a", ""], ValueError, "at least one character"),
    ("stop", 5, TypeError, "a str or a list of str, got 5"),
    ("stop", ["a", 5], TypeError, "a str or a list of str"),
    ("stop_token_ids", 5, TypeError, "a list of token ids, got 5"),
    ("stop_token_ids", "ab", TypeError, "a list of token ids, got 'ab'"),
    ("stop_token_ids", [1.5], TypeError, r"an int, got 1\.5"),
    ("stop_token_ids", [True], TypeError, "an int, got True"),
    ("stop_token_ids", [3, -1], ValueError, ">= 0, got -1"),
    ("include_stop_str_in_output", 0, TypeError, "True or False, got 0"),
    ("skip_special_tokens", None, TypeError, "True or False, got None"),
    ("detokenize", "no", TypeError, "True or False, got 'no'"),
    ("repetition_penalty", 0, ValueError, "got 0"),
    ("repetition_penalty", -1.5, ValueError, "got -1.5"),
    ("repetition_penalty", float("inf"), ValueError, "got inf"),
    ("repetition_penalty", "1", TypeError, "a number"),
    ("presence_penalty", 2.5, ValueError, r"in \[-2, 2\], got 2\.5"),
    ("presence_penalty", None, TypeError, "a number"),
    ("frequency_penalty", -2.5, ValueError, r"in \[-2, 2\], got -2\.5"),
    ("frequency_penalty", float("nan"), ValueError, "got nan"),
    ("logit_bias", [1], TypeError, "a dict from token id to number, got"),
    ("logit_bias", {1: 101}, ValueError, r"in \[-100, 100\], got 101"),
    ("logit_bias", {1: "a"}, TypeError, "number must be a number, got 'a'"),
    ("logit_bias", {"1": 1}, TypeError, "id must be an int, got '1'"),
    ("logit_bias", {-1: 1}, ValueError, "id must be >= 0, got -1"),
    ("allowed_token_ids", [], ValueError, "at least one id, got none"),
    ("allowed_token_ids", 7, TypeError, "a list of token ids, got 7"),
    ("allowed_token_ids", ["7"], TypeError, "an int, got '7'"),
    ("allowed_token_ids", [-7], ValueError, ">= 0, got -7"),
    ("logprobs", 21, ValueError, r"in \[0, 20\], got 21"),
    ("logprobs", -1, ValueError, r"in \[0, 20\], got -1"),
    ("logprobs", True, TypeError, "an int or None, got True"),
    ("prompt_logprobs", 21, ValueError, r"in \[0, 20\], got 21"),
    ("prompt_logprobs", 0.0, TypeError, "an int or None, got 0.0"),
]


def each(cases: list[Case]) -> pytest.MarkDecorator:
    names = [f"{name}={value!r:.12}" for name, value, _, _ in cases]
    return pytest.mark.parametrize(("name", "value", "error", "pattern"), cases, ids=names)


@pytest.fixture(scope="module")
def expected_ids(tiny_qwen3: Path) -> list[int]:
    return HuggingFace(tiny_qwen3).greedy(PROMPT, 4, stop=frozenset())


@pytest.fixture(scope="module")
def shared_llm(tiny_qwen3: Path) -> LLM:
    return make_llm(tiny_qwen3, **SIZES)


@pytest.fixture
def llm(shared_llm: LLM, expected_ids: list[int]) -> Iterator[LLM]:
    """Provides the shared engine, and checks after the test that nothing is queued in it and that
    its next answer is right."""
    yield shared_llm
    assert shared_llm.is_finished()
    assert shared_llm.scheduler.num_residents == 0
    shared_llm.scheduler.block_manager.check_integrity([])
    assert greedy_ids(shared_llm, [PROMPT], 4) == [expected_ids]


@pytest.fixture
def checkpoint(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """Makes a copy of the checkpoint that the test may damage."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompt(llm: LLM, case: str) -> None:
    prompt, error, pattern = BAD_PROMPTS[case]
    with pytest.raises(error, match=f"^prompt .*{pattern}"):
        llm.add_request(prompt, GREEDY)
    assert llm.is_finished()
    with pytest.raises(error, match=f"^prompt 3 .*{pattern}"):
        llm.generate(["a", [2], "b", prompt, "c"], GREEDY, use_tqdm=False)
    assert llm.is_finished()


def test_bad_single_prompt(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^prompt 0 is empty"):
        llm.generate("", GREEDY)
    with pytest.raises(ValueError, match=r"^prompt 0 has token id 512 at index 1"):
        llm.generate([2, VOCAB_SIZE], GREEDY)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, {"a", "b"}, b"a"])
def test_prompts_of_wrong_type(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompts must be a list.*got " + re.escape(repr(prompts))):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("num_params", [0, 2, 4])
def test_params_and_prompts_of_other_lengths(llm: LLM, num_params: int) -> None:
    with pytest.raises(ValueError, match=f"{num_params} sampling_params for 3 prompts.*one each"):
        llm.generate(["a", "b", "c"], [GREEDY] * num_params)


@pytest.mark.parametrize("params", ["greedy", {"temperature": 0}, 0, (GREEDY, GREEDY)])
def test_params_of_wrong_type(llm: LLM, params: Any) -> None:
    got = re.escape(repr(params)[:200])
    with pytest.raises(TypeError, match=f"sampling_params 0 must be a SamplingParams, got {got}"):
        llm.generate(["a", "b"], params)
    with pytest.raises(TypeError, match=f"sampling_params must be a SamplingParams, got {got}"):
        llm.add_request("a", params)
    with pytest.raises(TypeError, match=f"sampling_params 1 must be a SamplingParams, got {got}"):
        llm.generate(["a", "b"], [GREEDY, params])


def test_a_wrong_value_is_shown_only_in_part(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"^prompts must be") as caught:
        llm.generate({"a": "b" * 1000})
    assert len(str(caught.value)) < 500


def test_params_that_do_not_suit_the_model(llm: LLM) -> None:
    params = SamplingParams(stop_token_ids=[512])
    with pytest.raises(ValueError, match=r"^sampling_params 1: stop_token_ids must be .* got 512"):
        llm.generate(["a", "b"], [GREEDY, params])
    with pytest.raises(ValueError, match=r"^sampling_params: stop_token_ids must be .* got 512"):
        llm.add_request("a", params)


@pytest.mark.parametrize(
    ("seq_id", "error", "pattern"),
    [("0", TypeError, "an int"), (True, TypeError, "an int"), (-1, ValueError, "returned, got -1"),
     (10**6, ValueError, "returned, got 1000000")],
)  # fmt: skip
def test_abort_of_what_is_no_request(
    llm: LLM, seq_id: Any, error: type[Exception], pattern: str
) -> None:
    with pytest.raises(error, match=f"^seq_id must be .*{pattern}"):
        llm.abort(seq_id)


@each(BAD_SAMPLING)
def test_bad_sampling_params(name: str, value: Any, error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=f"^{name} must be .*{pattern}"):
        SamplingParams(**{name: value})


@each(BAD_CONFIGS)
def test_bad_config(
    tiny_qwen3: Path, name: str, value: Any, error: type[Exception], pattern: str
) -> None:
    with pytest.raises(error, match=pattern) as caught:
        make_llm(tiny_qwen3, **(SIZES | {name: value}))
    message = str(caught.value).replace(" ", "_")
    assert name in message
    shown = re.escape(str(value))
    assert re.search(rf"(got |=)'?{shown}\b|'{shown}'", str(caught.value)), "the bad value is named"


def test_unknown_keyword_suggests_the_near_match(tiny_qwen3: Path) -> None:
    with pytest.raises(TypeError, match="'max_model_length'; did you mean 'max_model_len'"):
        LLM(str(tiny_qwen3), max_model_length=64)
    with pytest.raises(TypeError, match=r"'quux'; known: .*max_num_seqs"):
        LLM(str(tiny_qwen3), quux=1)
    with pytest.raises(TypeError, match="unknown keyword 'hf_config'"):
        LLM(str(tiny_qwen3), hf_config=None)


def test_pool_smaller_than_one_request(tiny_qwen3: Path) -> None:
    fix = "takes 4 blocks.*raise num_kvcache_blocks to 4 or lower max_model_len to 48"
    with pytest.raises(ValueError, match=f"3 blocks x 16 tokens.*max_model_len=64.*{fix}"):
        make_llm(tiny_qwen3, **(SIZES | {"num_kvcache_blocks": 3}))
    make_llm(tiny_qwen3, **(SIZES | {"num_kvcache_blocks": 4})).exit()


def test_not_a_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"'Qwen/Qwen3-0.6B' does not exist.*download"):
        LLM("Qwen/Qwen3-0.6B")
    with pytest.raises(TypeError, match=r"model must be the path.*got 5"):
        LLM(5)  # type: ignore[arg-type]
    (checkpoint / "model.safetensors").rename(checkpoint / "model.bin")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file.*download"):
        LLM(str(checkpoint))
    (checkpoint / "config.json").write_text("{")
    (checkpoint / "model.bin").rename(checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        LLM(str(checkpoint))
    (checkpoint / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json.*download"):
        LLM(str(checkpoint))


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_cuda_without_triton_is_refused_with_the_fix(
    device: str, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton is needed by all layers on CUDA, and by none on the CPU."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fix = "needs the package triton.*pip install triton, or use device='cpu'"
    with pytest.raises(ValueError, match=fix):
        LLM(str(tiny_qwen3), device=device)
    assert Config(str(tiny_qwen3), device="cpu").torch_device == torch.device("cpu")


def test_use_after_exit(tiny_qwen3: Path) -> None:
    llm = make_llm(tiny_qwen3, **SIZES)
    llm.exit()
    uses: list[Callable[[], object]] = [
        lambda: llm.generate("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.stream("a"),
        lambda: llm.add_request("a", GREEDY),
        lambda: llm.update_weights([]),
        llm.reset_prefix_cache,
        llm.step,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"closed by exit\(\); make a new LLM"):
            use()
