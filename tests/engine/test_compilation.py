"""Tests that constructing an engine compiles all its kernels, some of them in parallel."""

import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine.compilation import compile_together, decode_attention_calls
from nanovllm.engine.warm_up import warm_up_batches
from nanovllm.layers.attention import Attention, LayerCache
from nanovllm.utils.peer_memory import MIN_ROWS, PeerMemory
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.faults import SOON
from tests.helpers.kernel_cases import DEVICE

CPU = torch.device("cpu")


def test_launches_are_made_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the runner's")
    streams: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda s: streams.append(s) or nullcontext())
    made_current: set[int] = set()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made_current.add(get_ident()))
    barrier = Barrier(3)

    def launch() -> None:
        assert get_ident() in made_current, "the context is not this thread's"
        assert torch.is_inference_mode_enabled()
        barrier.wait(SOON)

    def fail() -> None:
        launch()
        raise RuntimeError("out of registers")

    compile_together([launch] * 3, CPU)
    assert streams == ["the runner's"] * 3
    with pytest.raises(RuntimeError, match="out of registers"):
        compile_together([launch, fail, launch], CPU)


def test_attention_is_launched_with_empty_contexts() -> None:
    pytest.importorskip("triton")
    from nanovllm.layers.attention_backends.triton import TritonBackend

    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=64)
    caches = torch.full((2, 3, 16, 2, 64), float("nan"), device=DEVICE)
    attention.bind(TritonBackend(), LayerCache(*caches))
    outs = [call() for call in decode_attention_calls(attention, [1, 5], torch.float32)]
    for out, size in zip(outs, (1, 1, 5, 5), strict=True):  # without and with shared prefixes
        assert torch.equal(out, torch.zeros(size, 4, 64, device=DEVICE))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("hidden_size", [64, 1024, 2560, 5120])
@pytest.mark.parametrize(("budget", "max_num_seqs"), [(16384, 512), (600, 4), (300, 16)])
def test_warm_up_sums_with_every_number_of_warps(
    num_ranks: int, hidden_size: int, budget: int, max_num_seqs: int, tiny_qwen3: Path
) -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.all_reduce import sum_warps

    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs, "max_model_len": 256}
    config = Config(str(tiny_qwen3), device="cpu", **sizes)
    nothing = torch.empty(0)
    row_bytes = 2 * hidden_size
    peers = PeerMemory(0, num_ranks, MIN_ROWS, row_bytes, nothing, nothing, nothing)

    def kernels(nums_rows: Iterable[int]) -> set[int]:
        sums = (n for n in nums_rows if peers.suits_sum(n, row_bytes))
        return {sum_warps(n, 1 << (hidden_size - 1).bit_length(), num_ranks) for n in sums}

    nums_rows = [b.num_prefilled or b.num_decoded for b in warm_up_batches(config, [])]
    assert kernels(nums_rows) == kernels(range(1, max(nums_rows) + 1))


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("max_model_len", [256, 32768])
@pytest.mark.parametrize(("budget", "max_num_seqs"), [(16384, 512), (600, 4), (300, 100)])
def test_warm_up_needs_every_launch_of_prefill_attention(
    budget: int, max_num_seqs: int, max_model_len: int, kv_heads: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.prefill_launch import prefill_config

    checkpoint = make_checkpoint(tmp_path, max_position_embeddings=max_model_len)
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}
    config = Config(str(checkpoint), device="cpu", max_model_len=max_model_len, **sizes)

    def launch(num_tokens: int, num_seqs: int, max_seqlen_k: int, is_paged: bool) -> object:
        q = torch.empty(num_tokens, 2 * kv_heads, 128, dtype=torch.bfloat16, device="meta")
        launch, splits = prefill_config(q, num_seqs, kv_heads, max_seqlen_k, is_paged)
        return launch, splits > 1, is_paged

    warm = {
        launch(part.num_tokens, len(part.rows), part.max_context_len, part.chunks[0].start > 0)
        for batch in warm_up_batches(config, [])
        if (part := batch.prefill) is not None
    }
    for num_tokens in {1, 20, 144, 300, 600, 3000, 16384}:
        for num_seqs in {1, 4, 30, 100, 512}:
            if num_seqs <= num_tokens <= budget and num_seqs <= max_num_seqs:
                longest = min(num_tokens - num_seqs + 1, max_model_len)
                assert launch(num_tokens, num_seqs, longest, False) in warm
                for max_seqlen_k in {longest + 1, max_model_len - 1}:
                    assert launch(num_tokens, num_seqs, max_seqlen_k, True) in warm


COUNT_COMPILATIONS = """
import random, sys, threading
from triton import knobs
from nanovllm import LLM, SamplingParams
from nanovllm.engine import autotune

autotune.MARGIN = 1e9  # one of our own matmuls, however slow
compiled = []
threads = set()

def note(repr, **kwargs):
    compiled.append(repr)
    threads.add(threading.current_thread())

knobs.runtime.jit_post_compile_hook = note
sizes = {"max_num_seqs": 40, "max_num_batched_tokens": 700, "max_model_len": 600}
sizes |= {"num_kvcache_blocks": 128}
llm = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=sys.argv[2] == "eager", **sizes)
assert len(threads) > 2, "some side by side"
compiled.clear()
rng = random.Random(0)
prompts = [[rng.randrange(500) for _ in range(rng.randint(1, 520))] for _ in range(70)]
prompts += [prompt[:300] + [1, 2, 3] for prompt in prompts[:20]]
params = [
    SamplingParams(temperature=i % 3, max_tokens=rng.randint(1, 60), ignore_eos=True)
    for i in range(len(prompts))
]
llm.generate(prompts, params, use_tqdm=False)
llm.exit()
sys.exit("\\n".join(compiled) or 0)
"""


EXPERTS = {
    "architecture": "Qwen3MoeForCausalLM",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "heads", "kv_heads", "head_dim", "overrides"),
    [
        ("graphs", 4, 2, 64, {}),
        ("graphs", 4, 2, 128, {}),
        ("graphs", 48, 48, 128, {}),  # enough heads for every launch of decode attention
        ("eager", 48, 48, 128, {}),
        ("graphs", 4, 2, 64, EXPERTS),
        ("eager", 4, 2, 64, EXPERTS),
    ],
)
def test_nothing_is_compiled_after_construction(
    mode: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    overrides: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The engine runs in a process of its own, in which no other test has compiled anything."""
    checkpoint = make_checkpoint(
        tmp_path,
        **overrides,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
    )
    command = [sys.executable, "-c", COUNT_COMPILATIONS, str(checkpoint), mode]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
