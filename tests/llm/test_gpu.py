"""Measures how far the engine's logits on a GPU in half precision are from the fp32 truth.

All decoding is teacher-forced over fixed ids: with random weights, bf16 logits tie, so sampled ids
may differ.
"""

import importlib.util
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.engine import autotune, shared_prefix
from nanovllm.engine.batch import PrefillChunk, PrefillPart, RowInit, ScheduledBatch
from nanovllm.engine.cuda_graph import StepGraphs, bucket_sizes
from nanovllm.engine.decode_layout import RowsLayout
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.kernels import dependent_launch
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.linear import Linear
from tests.helpers.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.helpers.engines import greedy_ids, make_llm, sampled_ids
from tests.helpers.reference import HuggingFace

pytestmark = pytest.mark.gpu

PROMPT, FORCED = 48, 24  # numbers of tokens to prefill, and then to decode one by one
NUM_SEQS = 6
BACKENDS = ["triton", "torch"] + ["flash_attn"] * bool(importlib.util.find_spec("flash_attn"))


# All experts are active: where two are about equally probable, rounding may swap them, which would
# change the logits far more than it should.
EXPERTS = {
    "architecture": "Qwen3MoeForCausalLM",
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": {"head_dim": 64},
    "heads of 128": {"head_dim": 128},
    "experts": EXPERTS | {"head_dim": 64},
}


def make_shape(path: Path, name: str) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    return make_checkpoint(path, **(sizes | SHAPES[name]))


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shape(tmp_path_factory.mktemp("shape"), request.param)


@pytest.fixture(scope="module")
def token_ids() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(PROMPT + FORCED)] for _ in range(NUM_SEQS)]


@pytest.fixture(scope="module")
def truth(checkpoint: Path, token_ids: list[list[int]]) -> torch.Tensor:
    """Returns Hugging Face's fp32 logits after each forced token, [FORCED, NUM_SEQS, vocab]."""
    model = HuggingFace(checkpoint).model
    with torch.inference_mode():
        return model(torch.tensor(token_ids)).logits[:, PROMPT:].transpose(0, 1)


def make_gpu_llm(checkpoint: Path, **config: Any) -> LLM:
    """Makes an engine whose blocks every attention backend can read."""
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "num_kvcache_blocks": 64}
    return make_llm(checkpoint, **({"device": "cuda", "kvcache_block_size": 256} | sizes | config))


def relative_error(logits: torch.Tensor, truth: torch.Tensor) -> float:
    return float((logits.detach().float().cpu() - truth).norm() / truth.norm())


@pytest.fixture(scope="module")
def hugging_face_error(
    checkpoint: Path, token_ids: list[list[int]], truth: torch.Tensor
) -> dict[torch.dtype, float]:
    """Measures the error of Hugging Face's half-precision model on the GPU, which decodes token by
    token as the engine does."""
    errors = {}
    for dtype in (torch.bfloat16, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(checkpoint).to("cuda", dtype).eval()
        ids = torch.tensor(token_ids, device="cuda")
        with torch.inference_mode():
            past = model(ids[:, :PROMPT], use_cache=True).past_key_values
            logits = []
            for i in range(PROMPT, PROMPT + FORCED):
                out = model(ids[:, i : i + 1], past_key_values=past, use_cache=True)
                past = out.past_key_values
                logits.append(out.logits[:, -1])
        errors[dtype] = relative_error(torch.stack(logits), truth)
    return errors


def forced_decode(runner: ModelRunner, token_ids: list[list[int]], use_graph: bool) -> torch.Tensor:
    """Prefills the prompts, each in a row of its own, decodes the rest, and returns logits of the
    shape of `truth`."""
    block_size = runner.config.kvcache_block_size
    width = -(-(PROMPT + FORCED) // block_size)
    rows, greedy = list(range(NUM_SEQS)), SamplingParams(temperature=0)
    chunks = []
    for row, ids in zip(rows, token_ids, strict=True):
        table = [row * width + i for i in range(width)]
        init = RowInit(greedy, 0, table)
        chunks.append(PrefillChunk(0, ids[:PROMPT], is_last=True, is_cached=False, init=init))
    part = PrefillPart(rows, rows, chunks, max_context_len=PROMPT)
    runner.launch(ScheduledBatch(prefill=part)).token_ids()

    def step(rows: torch.Tensor) -> torch.Tensor:
        inputs = runner.rows.decode_inputs(rows, runner.config.max_model_len)
        return runner.model.compute_logits(runner._forward(inputs))

    with torch.inference_mode(), autotune.applied(runner._tuned_matmuls):
        device_rows = torch.tensor(rows + [-1] * 2, device="cuda")  # adds 2 rows of padding
        replay = step
        if use_graph:
            with torch.cuda.stream(torch.cuda.Stream()):
                layout = RowsLayout(len(device_rows))
                graphs = StepGraphs(lambda _, rows: (step(rows),), [layout], runner.device)

                def replay(rows: torch.Tensor) -> torch.Tensor:
                    return graphs.replay(layout, rows)[0]

        logits = []
        for i in range(PROMPT, PROMPT + FORCED):
            forced = torch.tensor([ids[i] for ids in token_ids]).cuda()
            runner.rows.sampling.last_tokens[:NUM_SEQS] = forced
            logits.append(replay(device_rows)[:NUM_SEQS].clone())
        return torch.stack(logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_as_accurate_as_hugging_face(
    backend: str,
    dtype: torch.dtype,
    checkpoint: Path,
    token_ids: list[list[int]],
    truth: torch.Tensor,
    hugging_face_error: dict[torch.dtype, float],
) -> None:
    if backend == "flash_attn" and dtype == torch.float16:
        pytest.skip("some builds of flash-attn have no fp16")
    with make_gpu_llm(checkpoint, dtype=dtype, attention_backend=backend) as llm:
        assert llm._runner is not None
        eager = forced_decode(llm._runner, token_ids, use_graph=False)
        error = relative_error(eager, truth)
        print(f"{backend} {dtype}: {error:.4f}, Hugging Face {hugging_face_error[dtype]:.4f}")
        assert error < 1.5 * hugging_face_error[dtype]
        if backend != "torch":
            graph = forced_decode(llm._runner, token_ids, use_graph=True)
            assert torch.equal(graph, eager), "a graph must replay the eager step to the bit"


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_generates_in_every_dtype(dtype: str, tiny_qwen3: Path) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    with make_gpu_llm(tiny_qwen3, dtype=dtype) as llm:
        runs = [sampled_ids(llm, [[5, 6, 7]] * 20, params) for _ in range(2)]
    assert all(len(ids) == 40 for ids in runs[0])
    assert len({tuple(ids) for ids in runs[0]}) == 20
    assert runs[0] != runs[1], "other request numbers, other seeds"


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 17, 100, 500])
def test_any_max_num_seqs_with_graphs(
    max_num_seqs: int, tiny_qwen3: Path, ragged_prompts: list[list[int]]
) -> None:
    assert bucket_sizes(max_num_seqs)[-1] == max_num_seqs
    prompts = (ragged_prompts * 16)[:max_num_seqs]
    ids = []
    for device in ("cuda", "cpu"):
        sizes = {"max_num_seqs": max_num_seqs, "num_kvcache_blocks": 4096}
        with make_llm(tiny_qwen3, device=device, **sizes) as llm:
            ids.append(greedy_ids(llm, prompts, 8))
    assert ids[0] == ids[1]


def test_shared_prefixes_that_are_read_once_change_no_text(
    tiny_qwen3: Path, ragged_prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of prompts, and some that share nothing, in fp32."""
    monkeypatch.setattr(shared_prefix, "ENOUGH_SAVED", 1)
    monkeypatch.setattr(shared_prefix, "ENOUGH_SHARE", 0)
    stems = [[(7 * i + j) % VOCAB_SIZE for i in range(48)] for j in range(2)]
    prompts = [stems[i % 2] + [i, 3] for i in range(14)] + ragged_prompts[:4]
    with make_llm(tiny_qwen3, device="cuda") as llm:
        groups: list[int] = []
        schedule = llm.scheduler.schedule

        def spy() -> Any:
            batch = schedule()
            if batch is not None and batch.decode:
                groups.append(len(batch.decode.prefix_groups))
            return batch

        llm.scheduler.schedule = spy  # type: ignore[method-assign]
        ids = greedy_ids(llm, prompts, 24)
    assert max(groups) == 2
    with make_llm(tiny_qwen3, enable_prefix_caching=False) as llm:
        assert greedy_ids(llm, prompts, 24) == ids


@pytest.mark.parametrize("kind", ["o_proj", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("shape", ["heads of 64", "heads of 128"])
def test_autotuned_matmuls_are_as_good(
    shape: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patched margin makes the engine choose the fastest of its own kernels for each number of
    tokens, even where torch's matmul is faster."""
    monkeypatch.setattr(autotune, "MARGIN", 1e9)
    checkpoint = make_shape(tmp_path, shape)
    with make_gpu_llm(checkpoint, dtype="bfloat16", max_num_seqs=64) as llm:
        assert llm._runner is not None
        linear = linear_of(llm, kind)
        assert linear.matmuls == (), "eager steps use torch's own"
        tuned = llm._runner._tuned_matmuls
        (matmuls,) = [matmuls for layer, matmuls in tuned if layer is linear]
        assert [most for most, _ in matmuls] == [1, 2, 4, 16, 64]
        assert all(matmul is not None for _, matmul in matmuls)
        for num_tokens in (1, 2, 3, 16, 17, 64, 65):
            x = torch.randn(num_tokens, linear.weight.shape[1]).cuda().bfloat16()
            with autotune.applied(tuned):
                out = linear(x).float()
            out = out if out.dim() == 2 else out.sum(0)
            expected = x.float() @ linear.weight.float().T
            if linear.is_gated:
                expected = silu_and_mul(expected)
            assert relative_error(out, expected.cpu()) < 5e-3


def test_kernels_that_start_early_change_no_bit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that read or wrote too early would differ in the K/V of some layer, step or sequence."""
    if not dependent_launch.has_dependent_launch(torch.device("cuda")):
        pytest.skip("before Hopper no kernel starts early")
    monkeypatch.setattr(autotune, "MARGIN", 1e9)  # our own matmuls, which start early
    with make_gpu_llm(checkpoint, dtype="bfloat16") as llm:
        assert llm._runner is not None
        runner = llm._runner

        def decode(num_rows: int) -> list[torch.Tensor]:
            """Decodes 100 tokens of each row after 200 random ones; returns ids and K/V."""
            generator = torch.Generator("cuda").manual_seed(num_rows)
            caches = [cache for layer in runner.model.attention_layers for cache in layer.cache]
            for cache in caches:
                cache.normal_(generator=generator)
            layout, rows = RowsLayout(num_rows), torch.arange(num_rows).cuda()
            state = runner.rows.sampling
            runner.rows.block_tables.copy_(torch.arange(16).view(8, 2))
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                step = partial(runner.decode_step, max_context_len=512)
                graphs = StepGraphs(lambda _, rows: step(rows), [layout], runner.device)
                state.context_lens.fill_(200)
                state.last_tokens.copy_(torch.arange(8))
                ids = [graphs.replay(layout, rows)[0].clone() for _ in range(100)]
                torch.cuda.synchronize()
            return [*ids, *(cache.clone() for cache in caches)]

        with torch.inference_mode(), autotune.applied(runner._tuned_matmuls):
            early = [decode(n) for n in (1, 2, 4, 8)]
            monkeypatch.setattr(dependent_launch, "has_dependent_launch", lambda _: False)
            for num_rows, expected in zip((1, 2, 4, 8), early, strict=True):
                assert all(map(torch.equal, decode(num_rows), expected))


@pytest.mark.parametrize("config", [{"autotune_matmul": False}, {"enforce_eager": True}])
def test_matmuls_are_torchs_own_without_autotuning(
    config: dict[str, bool], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "MARGIN", 1e9)
    with make_gpu_llm(checkpoint, dtype="bfloat16", **config) as llm:
        assert llm._runner is not None
        assert llm._runner._tuned_matmuls == []


def linear_of(llm: LLM, kind: str) -> Linear:
    assert llm._runner is not None
    layer = llm._runner.model.model.layers[1]
    linear: Linear = getattr(layer.self_attn if kind == "o_proj" else layer.mlp, kind)
    return linear


def test_construction_leaves_the_users_random_numbers_alone(checkpoint: Path) -> None:
    state = torch.cuda.get_rng_state()
    make_gpu_llm(checkpoint, dtype="bfloat16").exit()
    assert torch.equal(torch.cuda.get_rng_state(), state)
