"""Tests engines that keep K and V in 8 bits: how it is scheduled decides about no token, the pool
has the room that it should, logits stay close, and who cannot do it says so."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.kv_accuracy import RoundedKV, fp8, load, measure
from nanovllm import LLM, SamplingParams, sample_seed
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.attention_backends import AttentionLayout, select_backend
from tests.helpers.engines import greedy_ids, make_llm, make_paged_llm
from tests.helpers.reference import next_token_logits

NUM_TOKENS = 16
Prompts = list[list[int]]
MakeLLM = Callable[..., LLM]
CONFIGS: dict[str, dict[str, Any]] = {
    "cold and cached": {},
    "chunked": {"max_num_batched_tokens": 23},
    "preempting": {"num_kvcache_blocks": 9, "max_num_batched_tokens": 20},
    "blocks of one token": {"kvcache_block_size": 1, "num_kvcache_blocks": 4096},
    "synchronous": {"async_scheduling": False, "max_num_seqs": 3},
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest, tiny_qwen3: Path) -> MakeLLM:
    return partial(make_llm, tiny_qwen3, device=request.param, kv_cache_dtype="fp8")


def runner(llm: LLM) -> ModelRunner:
    assert isinstance(llm._runner, ModelRunner)
    return llm._runner


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path, ragged_prompts: Prompts) -> Prompts:
    """Returns the ids of an engine on the CPU that computes one prompt and one step at a time."""
    plain = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 1}
    with make_llm(tiny_qwen3, kv_cache_dtype="fp8", **plain) as llm:
        return [greedy_ids(llm, [prompt], NUM_TOKENS)[0] for prompt in ragged_prompts]


@pytest.mark.parametrize("config", CONFIGS)
def test_scheduling_changes_no_token(
    config: str, make: MakeLLM, ragged_prompts: Prompts, expected: Prompts
) -> None:
    with make(**CONFIGS[config]) as llm:
        for _ in range(2):  # the second time chunks follow cache hits
            assert greedy_ids(llm, ragged_prompts, NUM_TOKENS) == expected


@pytest.mark.parametrize("config", [{}, {"tensor_parallel_size": 2}])
def test_samples_equal_requests_of_their_own(config: dict[str, Any], tiny_qwen3: Path) -> None:
    """Samples get copies of the block that their prompt fills in part, scales included."""
    seeded = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
    prompts = [[(7 * i + n) % 500 for i in range(n)] for n in (3, 8, 9)]
    with make_paged_llm(tiny_qwen3, kv_cache_dtype="fp8", **config) as llm:
        outputs = llm.generate(list(prompts), replace(seeded, n=3), use_tqdm=False)
    with make_paged_llm(tiny_qwen3, kv_cache_dtype="fp8", enable_prefix_caching=False) as llm:
        for prompt, output in zip(prompts, outputs, strict=True):
            own = [replace(seeded, seed=sample_seed(7, i)) for i in range(3)]
            alone = llm.generate([prompt] * 3, own, use_tqdm=False)
            samples = [sample["token_ids"] for sample in output["outputs"]]
            assert samples == [out["token_ids"] for out in alone]


def test_logits_are_those_of_hugging_face_with_rounded_kv(
    tiny_qwen3: Path, ragged_prompts: Prompts
) -> None:
    attention = RoundedKV()
    attention.rounding = fp8
    ALL_ATTENTION_FUNCTIONS.register("rounded_kv", attention)
    model = load(str(tiny_qwen3), torch.float32, outlier=1)
    prompts = ragged_prompts[:6]
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    with make_llm(tiny_qwen3, kv_cache_dtype="fp8") as llm:
        logits = next_token_logits(llm, prompts)
    with make_llm(tiny_qwen3) as llm:
        exact = next_token_logits(llm, prompts)
    # A few elements of K and V lie so close to the middle of two codes that fp32 decides.
    error, rounding = (logits - expected).norm(), (exact - expected).norm()
    assert error < 0.1 * rounding


def test_accuracy_of_a_real_model() -> None:
    """K and V in 8 bits change bfloat16's perplexity by at most 0.5 %, and its error against
    float32 by at most half; an outlier in K, which makes nonsense of a model, no more than that."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(2, 4000, (1, 200), generator=generator)
    demo = str(Path(__file__).parents[2] / "demo" / "austen")
    _, own, with_fp8, *_ = measure(demo, windows)
    assert abs(with_fp8.perplexity / own.perplexity - 1) < 0.005
    assert with_fp8.error < 1.5 * own.error
    _, own, with_fp8, *_ = measure(demo, windows, outlier=50)
    assert with_fp8.error < 1.5 * own.error


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1.78), ("float32", 3.56)])
def test_the_pool_counts_codes_and_scales(dtype: str, ratio: float, tiny_qwen3: Path) -> None:
    """An element takes a byte, and heads of 16 elements a scale of two bytes each for K and V."""
    with make_llm(tiny_qwen3, dtype=dtype) as llm:
        wide = runner(llm).kv_cache.block_bytes
    with make_llm(tiny_qwen3, dtype=dtype, kv_cache_dtype="fp8") as llm:
        cache = runner(llm).kv_cache
        assert wide / cache.block_bytes == pytest.approx(ratio, abs=0.005)
        num_bytes = 0
        for layer in runner(llm).model.attention_layers:
            assert layer.cache.scales is not None
            num_bytes += sum(pool.nbytes for pool in (*layer.cache, layer.cache.scales))
        assert num_bytes == cache.num_blocks * cache.block_bytes


@pytest.mark.parametrize("value", ["fp16", "FP8", None, 8])
def test_unknown_values_are_refused(value: Any, tiny_qwen3: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be 'auto' or 'fp8', got"):
        make_llm(tiny_qwen3, kv_cache_dtype=value)


@pytest.mark.parametrize("backend", ["flash_attn", "numba"])
def test_backends_without_8_bits_say_so(backend: str, tiny_qwen3: Path) -> None:
    with pytest.raises(ValueError, match=rf"'{backend}'.*kv_cache_dtype='fp8'; use 'triton'"):
        make_llm(tiny_qwen3, kv_cache_dtype="fp8", attention_backend=backend)


@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
def test_old_gpus_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    layout = AttentionLayout(torch.device("cuda"), torch.bfloat16, 128, 256, "fp8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8' needs .* 8\.9 .* has 8\.6; use"):
        select_backend(backend, layout)
