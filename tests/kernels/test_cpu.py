"""Tests the CPU kernels against the torch layers, and engines with and without them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanovllm import SamplingParams, kernels
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.attention import LayerCache, store_kv
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.closeness import assert_close
from tests.helpers.engines import greedy_ids, make_llm

pytest.importorskip("numba")
import numba
from numba.core.caching import CacheImpl

from nanovllm.kernels import cpu
from nanovllm.kernels.cpu import compile as compile_module

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# A kernel sums in another order, so an intermediate value may round to a neighbouring number.
NUM_EPS = {torch.float32: 32, torch.bfloat16: 2, torch.float16: 2}


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 64, 100, 576])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_add_rms_norm(num_rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x, residual = (10 * torch.randn(2, num_rows, size, generator=generator)).to(dtype)
    weight = (1 + torch.randn(size, generator=generator)).to(dtype)
    total = x + residual
    expected = F.rms_norm(total, weight.shape, eps=1e-5) * weight
    cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    if num_rows:
        assert_close(x, expected, num_eps=NUM_EPS[dtype])
    if dtype == torch.bfloat16:
        assert (x != expected).sum() <= 0.01 * x.numel()


def test_bf16_of_any_bits_rounds_as_torch_rounds() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (2, 2**16), generator=generator, dtype=torch.int16)
    bits[0] = torch.arange(-(2**15), 2**15)
    x, residual = bits.view(torch.bfloat16).view(2, -1, 64)
    total = x + residual
    assert all(kind.any() for kind in (total.isnan(), total.isinf(), total.abs() < 1e-38))
    cpu.add_rms_norm(x.clone(), residual, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    torch.testing.assert_close(residual, total, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (9, 3, 64), (8, 1, 40), (4, 2, 130)], ids=str)
def test_norm_rope_store(
    shape: tuple[int, int, int], has_norm: bool, dtype: torch.dtype, kv: torch.dtype
) -> None:
    heads, kv_heads, head_dim = shape
    num_tokens, num_blocks, block_size = 11, 7, 4
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 50, (num_tokens,), generator=generator)
    positions[0] = 49
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[5] = -1  # computed, but not stored
    rotary = RotaryEmbedding(head_dim, 50, 1e4)
    norms = [RMSNorm(head_dim, 1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data = (1 + torch.randn(head_dim, generator=generator)).to(dtype)
    caches = torch.full((2, num_blocks, block_size, kv_heads, head_dim), 7.0, dtype=kv)
    expected_caches = caches.clone()
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    expected = [q, k]
    if has_norm:
        expected = [norm(x).data for norm, x in zip(norms, expected, strict=True)]
    expected = [rotary(positions, x) for x in expected]
    store_kv(expected[1].to(kv), v.to(kv), LayerCache(*expected_caches), slots)

    out = qkv.clone()
    weights = (norms[0].weight.data, norms[1].weight.data) if has_norm else None
    eps = norms[0].eps if has_norm else 0.0
    cpu.norm_rope_store(out, positions, slots, rotary.cos_sin, weights, eps, caches[0], caches[1])
    assert_close(out[:, :heads], expected[0], num_eps=NUM_EPS[dtype])
    is_stored = slots >= 0
    stored = caches.flatten(1, 2)[:, slots[is_stored]]
    assert_close(stored[0], expected[1][is_stored].to(kv), num_eps=NUM_EPS[kv])
    assert torch.equal(stored[1], v[is_stored].to(kv))
    assert torch.equal(stored[0].to(dtype), out[is_stored, heads:-kv_heads])
    assert torch.equal(stored[1].to(dtype), out[is_stored, -kv_heads:])
    is_free = torch.ones(num_blocks * block_size, dtype=torch.bool)
    is_free[slots[is_stored]] = False
    assert (caches.flatten(1, 2)[:, is_free] == 7).all()


@pytest.mark.parametrize("num_threads", [cpu.MAX_THREADS, cpu.MAX_THREADS + 1])
def test_what_they_serve(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    rows = cpu.MAX_ELEMENTS // 64
    assert kernels.cpu_kernels(torch.empty(rows + 1, 64)) is cpu
    assert kernels.cpu_kernels(torch.empty(rows, 64, dtype=torch.bfloat16)) is cpu
    served = kernels.cpu_kernels(torch.empty(rows + 1, 64, dtype=torch.bfloat16))
    assert served is (cpu if num_threads <= cpu.MAX_THREADS else None)
    assert kernels.cpu_kernels(torch.empty(1, 64, dtype=torch.float16)) is None
    assert kernels.cpu_kernels(torch.empty(1, 64, device="meta")) is None


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def test_an_engine_with_them_gives_what_one_without_gives(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, architecture)
    prompts = [[5, 6, 7], list(range(40, 90)), [9]]
    calls: list[str] = []

    def counted(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            calls.append(kernel.__name__)
            kernel(*args)

        return call

    def completions() -> list[list[int]]:
        with make_llm(path, max_num_seqs=4) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), False)
        return [output["token_ids"] for output in outputs]

    for kernel in (cpu.add_rms_norm, cpu.norm_rope_store):
        monkeypatch.setattr(cpu, kernel.__name__, counted(kernel))
    with_kernels = completions()
    num_steps, num_layers = 20, 2
    # The first norm of a step has no residual, so it is another kernel.
    assert calls.count("add_rms_norm") == num_steps * (2 * num_layers)
    assert calls.count("norm_rope_store") == num_steps * num_layers
    calls.clear()
    monkeypatch.setattr(cpu, "is_faster", lambda x: False)
    assert completions() == with_kernels
    assert not calls


@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_compiled_after_construction(
    dtype: str, attention_backend: str, tiny_qwen3: Path
) -> None:
    compile_module.address_of.cache_clear()
    with make_llm(tiny_qwen3, dtype=dtype, attention_backend=attention_backend) as llm:
        compiled = compile_module._code.cache_info().misses
        known = compile_module.address_of.cache_info().currsize
        prompts = [[5, 6, 7], list(range(40, 90))]
        for temperature in (0, 1):
            params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)
        assert compile_module._code.cache_info().misses == compiled
        assert compile_module.address_of.cache_info().currsize == known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_logits_of_a_batch_are_to_the_bit_those_of_each_request_alone(
    dtype: str, tiny_qwen3: Path
) -> None:
    if not kernels.cpu_multiplies(getattr(torch, dtype)):
        pytest.skip("oneDNN or torch multiplies, and sums as the number of rows suggests")
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(1, 90, (32,), generator=generator).tolist()
    prompts = [torch.randint(2, 512, (n,), generator=generator).tolist() for n in lens]

    def logits(batches: list[list[list[int]]]) -> set[bytes]:
        rows: set[bytes] = set()
        with make_llm(tiny_qwen3, dtype=dtype, enable_prefix_caching=False) as llm:
            assert isinstance(llm._runner, ModelRunner)
            llm._runner.sampler.register_forward_pre_hook(
                lambda _, args: rows.update(row.numpy().tobytes() for row in args[0])
            )
            for batch in batches:
                greedy_ids(llm, batch, max_tokens=8)
        return rows

    together = logits([prompts])
    assert len(together) == 8 * len(prompts)
    assert together == logits([[prompt] for prompt in prompts])


@pytest.mark.parametrize("failure", ["import", "compilation", "no AVX2"])
def test_an_engine_without_numba_says_so_and_works(
    failure: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    script = f"""
import sys
if {failure == "import"}:
    sys.modules["numba"] = None
from nanovllm import LLM, SamplingParams
with LLM({str(tiny_qwen3)!r}, device="cpu") as llm:
    print(llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4), False))
"""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}  # an empty cache of compiled kernels
    env |= {"NUMBA_DISABLE_JIT": "1"} if failure == "compilation" else {}
    env |= {"ATEN_CPU_CAPABILITY": "default"} if failure == "no AVX2" else {}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    assert "token_ids" in run.stdout
    assert run.stderr.count("it is slower without") == (failure != "no AVX2")


def compiled_norm(dtype: torch.dtype) -> list[list[float]]:
    """Loads or compiles the kernel again, and returns its results for [[3], [2]] and [[1], [0]]
    with weight 2."""
    compile_module.address_of.cache_clear()
    compile_module._code.cache_clear()
    x, residual = torch.tensor([[[3.0], [2.0]], [[1.0], [0.0]]], dtype=dtype)
    cpu.add_rms_norm(x, residual, torch.tensor([2.0], dtype=dtype), 0.0)
    return [x.flatten().tolist(), residual.flatten().tolist()]


@DTYPES
def test_files_of_compiled_kernels(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled code is cached per dtype and version of the source. Where the cache is damaged
    or cannot be written, the kernel is compiled again."""
    expected = [[2.0, 2.0], [4.0, 2.0]]
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    assert compiled_norm(other) == compiled_norm(dtype) == expected
    kept = set(tmp_path.rglob("*.nb?"))
    assert len(kept) == 4  # an index and the code for each dtype
    assert compiled_norm(dtype) == expected
    assert set(tmp_path.rglob("*.nb?")) == kept
    for file in kept:
        file.write_bytes(b"")
    assert compiled_norm(dtype) == expected
    monkeypatch.setattr(compile_module, "VERSION", "another")
    assert compiled_norm(dtype) == expected
    assert len(set(tmp_path.rglob("*another*.nb?"))) == 2
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert compiled_norm(dtype) == expected
    compile_module.address_of.cache_clear()
    compile_module._code.cache_clear()


@DTYPES
def test_nothing_divided_by_nothing_is_what_it_is_in_torch(dtype: torch.dtype) -> None:
    x, residual = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], dtype=dtype), torch.zeros(3, 2)
    weight = torch.ones(2, dtype=dtype)
    expected = F.rms_norm(x, weight.shape, eps=0.0)
    cpu.add_rms_norm(x, residual.to(dtype), weight, 0.0)
    torch.testing.assert_close(x, expected, equal_nan=True)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 100, 1000])
def test_max_of_rows_takes_the_first_of_equals(size: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-9, 9, (num_rows, size), generator=generator).float()
    values, indices = cpu.max_of_rows(x)
    assert torch.equal(values, x.max(dim=-1).values if num_rows else torch.empty(0))
    assert indices.tolist() == [row.index(max(row)) for row in x.tolist()]


def test_max_of_rows_of_special_values() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan, nan, inf], [-inf, -inf, 3.0, inf], [-inf] * 4, [-0.0, 0.0, -1, 0]])
    values, indices = cpu.max_of_rows(x)
    torch.testing.assert_close(values, x.max(dim=-1).values, equal_nan=True)
    assert indices.tolist() == [1, 3, 0, 0]


@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (7, 30), (40, 3072)], ids=str)
def test_silu_and_mul(shape: tuple[int, int]) -> None:
    gate_up = 20 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gate, up = gate_up.chunk(2, dim=-1)
    out = cpu.silu_and_mul(gate_up)
    torch.testing.assert_close(out, F.silu(gate) * up, rtol=1e-6, atol=1e-30)


def test_silu_of_special_values() -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[0.0, -0.0, inf, -inf, nan, 88.0, -88.0, 200.0, -200.0, 1e-30]])
    out = cpu.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(out, F.silu(gate), rtol=1e-6, atol=1e-36, equal_nan=True)
