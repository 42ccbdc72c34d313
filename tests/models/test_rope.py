"""Tests RoPE and its scalings: frequencies, and logits and ids beyond the original context, equal
those of Hugging Face."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.config import Config
from nanovllm.layers.rope_scaling import Rope, max_context, read_rope
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.utils.distributed import TPGroup
from tests.helpers.checkpoints import VOCAB_SIZE, edit_json, make_checkpoint, rope_fields
from tests.helpers.closeness import assert_logits_close
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.ranks import capture_logits
from tests.helpers.reference import HuggingFace

THETA = 5e4
ORIGINAL, MAX_LEN = 48, 160
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": YARN,
    "yarn-exact-bounds": YARN | {"truncate": False},
    "yarn-attention": YARN | {"attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-one-frequency": YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": ORIGINAL},
    "llama3-of-8192": LLAMA3 | {"original_max_position_embeddings": 8192},
}


def parameters(case: str) -> dict[str, Any]:
    return {"rope_theta": THETA, "rope_type": case.partition("-")[0]} | SCALED[case]


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128])
@pytest.mark.parametrize("case", SCALED)
def test_frequencies_equal_hugging_face(case: str, head_dim: int) -> None:
    if "truncate" in SCALED[case] and transformers.__version__.startswith("4.5"):
        pytest.skip("this version of transformers does not know `truncate`")
    hf_config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        # Versions before 5 take YaRN's factor from the two contexts.
        max_position_embeddings=4 * ORIGINAL if "yarn" in case else ORIGINAL,
        **rope_fields(**parameters(case)),
    )
    init = ROPE_INIT_FUNCTIONS[parameters(case)["rope_type"]]
    expected, attention_factor = init(hf_config, None, seq_len=MAX_LEN)
    rope = read_rope(hf_config)
    assert rope.scaling is not None
    out = rope.scaling.frequencies(rope.theta, head_dim, MAX_LEN)
    assert out.dtype == torch.float32
    assert ((out - expected).abs() / expected).max() < 8 * torch.finfo(torch.float32).eps
    assert rope.scaling.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("case", SCALED)
def test_old_spelling_means_the_same(case: str) -> None:
    """transformers 4.x has `rope_scaling` and `rope_theta`, and once called `rope_type` `type`."""
    common = {"max_position_embeddings": ORIGINAL}
    new = SimpleNamespace(rope_parameters=parameters(case), **common)
    fields = parameters(case)
    kind, theta = fields.pop("rope_type"), fields.pop("rope_theta")
    for key in ("rope_type", "type"):
        old = SimpleNamespace(rope_scaling=fields | {key: kind}, rope_theta=theta, **common)
        assert read_rope(old) == read_rope(new)
    plain = SimpleNamespace(rope_scaling=None, rope_theta=theta, **common)
    assert read_rope(plain) == Rope(THETA)


def test_factor_of_yarn_follows_from_the_contexts() -> None:
    params = {"rope_type": "yarn", "original_max_position_embeddings": 32, "rope_theta": THETA}
    config = SimpleNamespace(rope_parameters=params, max_position_embeddings=128)
    assert read_rope(config).scaling.factor == 4.0


# Each family with one of the scalings.
CHECKPOINTS: dict[str, tuple[str, str]] = {
    "linear": ("MistralForCausalLM", "linear"),
    "dynamic": ("Qwen3ForCausalLM", "dynamic"),
    "yarn": ("Qwen2ForCausalLM", "yarn-attention"),
    "llama3": ("LlamaForCausalLM", "llama3"),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, scaling = CHECKPOINTS[case]
    own: dict[str, Any] = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    own |= {"max_position_embeddings": 4 * ORIGINAL if case in ("llama3", "yarn") else ORIGINAL}
    own |= rope_fields(**parameters(scaling))
    return make_checkpoint(tmp_path_factory.mktemp(case), architecture, **own)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Returns prompts beyond the original context, two of which share a prefix."""
    rng = random.Random(3)
    first, second = ([rng.randrange(2, VOCAB_SIZE) for _ in range(130)] for _ in range(2))
    return [first, second[:60], first[:70] + second[:20]]


@pytest.fixture(scope="module")
def expected(
    case: str, checkpoint: Path, prompts: list[list[int]]
) -> tuple[torch.Tensor, list[list[int]]]:
    """Returns Hugging Face's logits after the prompts, and 20 greedy ids each."""
    reference = HuggingFace(checkpoint)
    logits, ids = [], []
    for prompt in prompts:
        if case == "dynamic":
            # It keeps the frequencies of the longest sequence until a short one comes.
            reference.last_logits([2] * MAX_LEN)
        logits.append(reference.last_logits(prompt))
        ids.append(reference.greedy(prompt, 20, stop=frozenset()))
    return torch.stack(logits), ids


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_beyond_the_original_context(
    num_ranks: int,
    checkpoint: Path,
    prompts: list[list[int]],
    expected: tuple[torch.Tensor, list[list[int]]],
) -> None:
    """The prompts come in chunks at first, and from the prefix cache the second time."""
    logits, ids = expected
    sizes = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 48, "num_kvcache_blocks": 64}
    with make_llm(checkpoint, tensor_parallel_size=num_ranks, **sizes) as llm:
        assert llm.config.max_model_len == MAX_LEN
        captured = capture_logits(llm)
        for prompt in [*prompts, *prompts]:
            greedy_ids(llm, [prompt], max_tokens=1)
        out = torch.cat(captured).unflatten(0, (2, -1))  # [2, prompts, rank 0's share]
        assert greedy_ids(llm, prompts, max_tokens=20) == ids
    assert_logits_close(out, logits[:, : out.shape[-1]].expand_as(out))


def test_dynamic_is_plain_up_to_the_own_context(
    tmp_path: Path, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(
        tmp_path, max_position_embeddings=MAX_LEN, **rope_fields(**parameters("dynamic"))
    )
    reference = HuggingFace(path)
    with make_llm(path, max_model_len=MAX_LEN) as llm:
        ids = greedy_ids(llm, prompts, max_tokens=20)
    assert ids == [reference.greedy(prompt, 20, stop=frozenset()) for prompt in prompts]
    assert "dynamic" not in caplog.text
    Config(str(path), device="cpu", max_model_len=MAX_LEN + 1)
    assert f"max_model_len={MAX_LEN + 1}: all sequences are rotated as Hugging Face" in caplog.text


@pytest.mark.parametrize(
    ("case", "limit"),
    [("linear", 192), ("dynamic", 192), ("yarn", 192), ("llama3", 48), ("llama3-of-8192", 48)],
)
def test_max_model_len_may_use_the_scaled_context(
    case: str, limit: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", with_tokenizer=False)
    changes = {"max_position_embeddings": ORIGINAL} | rope_fields(**parameters(case))
    edit_json(path / "config.json", **changes)
    assert Config(str(path), device="cpu", max_model_len=limit).max_model_len == limit
    assert "exceeds" not in caplog.text
    config = Config(str(path), device="cpu", max_model_len=limit + 1)
    assert config.max_model_len == max_context(config.hf_config) == limit
    assert f"max_model_len={limit + 1} exceeds" in caplog.text


def test_table_is_as_long_as_max_model_len(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(max_position_embeddings=1_010_000, num_hidden_layers=1, **shape)
    model = LlamaForCausalLM(config, TPGroup(), tie_word_embeddings=True, max_model_len=100)
    assert {tuple(table.shape) for table in model.buffers()} == {(100, 16)}
