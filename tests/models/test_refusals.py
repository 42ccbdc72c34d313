"""Tests that a config which the engine would compute wrongly is refused by name, before weights are
read, memory is taken or a process is started."""

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.engine import llm_engine
from tests.helpers.checkpoints import edit_json, make_checkpoint
from tests.helpers.engines import greedy_ids, make_llm
from tests.helpers.reference import HuggingFace

SIZES = {"max_model_len": 64, "num_kvcache_blocks": 9}
PROMPT = [7, 8, 9]


def rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | params}


def rope_4(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": kind} | params}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
NEW_TYPES = "not supported; supported: default, linear, dynamic, yarn, llama3"
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["NoSuchForCausalLM"]}, "NoSuch.*LlamaForCausalLM"),
    "no architecture": ({"architectures": None}, "not supported; supported: .*Qwen3ForCausalLM"),
    "one architecture": ({"architectures": "Qwen3ForCausalLM"}, "Qwen3ForCausalLM are not"),
    "model type": ({"model_type": "no-such-type"}, "cannot read .*config.json: .*no-such-type"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'.*only 'silu'"),
    "head counts": (
        {"num_key_value_heads": 3},
        "num_attention_heads=4 is no multiple of num_key_value_heads=3",
    ),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be an int from 1 to 1000.* 0"),
    "many layers": ({"num_hidden_layers": 10**9}, f"num_hidden_layers must be .* got {10**9}"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "negative size": ({"intermediate_size": -96}, "intermediate_size must be an int .* got -96"),
    "absurd size": ({"hidden_size": 10**30}, f"hidden_size must be an int .* got {10**30}"),
    "absurd vocabulary": (
        {"vocab_size": 2**31 - 1},
        r"embed_tokens.weight': its shape is \[512, 64\], the config asks for \[2147483647, 64\]",
    ),
    "vocabulary beyond an int": ({"vocab_size": 10**12}, f"vocab_size must be .* got {10**12}"),
    "negative heads": ({"num_attention_heads": -4}, "num_attention_heads must be .* got -4"),
    "no head_dim": ({"head_dim": 0}, "head_dim must be a positive, even int up to 65536, got 0"),
    "absurd head_dim": ({"head_dim": 2**30}, f"head_dim must be .*got {2**30}"),
    "many labels": ({"num_labels": 10**9}, f"num_labels must be an int up to 65536, got {10**9}"),
    "bias as number": ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
    "tie as text": ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be .*got 'no'"),
    "end as text": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or .*got '</s>'"),
    "end beyond": ({"eos_token_id": [1, 512]}, r"below vocab_size=512, got \[512\] in config"),
    "window as text": ({"sliding_window": "4096"}, "sliding_window must be an int .*got '4096'"),
    "layers of no type": ({"layer_types": [None, None]}, "layer_types must be a list of texts"),
    "type of a list": ({"model_type": ["qwen3"]}, r"model_type must be a text, got \['qwen3'\]"),
    "architecture of lists": ({"architectures": [["a"]]}, r"\[\['a'\]\] are not supported"),
    "NaN epsilon": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be .*got nan"),
    "dtype": ({"dtype": "float64"}, "the checkpoint's is 'float64'; pass another"),
    "dtype of no name": (
        {"dtype": ["float16"]},
        r"the checkpoint's is \['float16",
    ),
    "no context": ({"max_position_embeddings": 0}, "max_position_embeddings must be an int"),
    "text for a size": ({"hidden_size": "64"}, "hidden_size"),
    "odd heads": ({"head_dim": 15}, "15"),
    "no epsilon": ({"rms_norm_eps": -1.0}, r"rms_norm_eps must be .*got -1\.0"),
    "quantized": (
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "quantization_config=.*awq.*use a checkpoint of bfloat16",
    ),
    "capped attention": ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
    "capped logits": ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
    "clipped": ({"clip_qkv": 8.0}, r"clip_qkv=8\.0 is not supported; only None is"),
    "scaled logits": ({"logits_scaling": 8.0}, r"logits_scaling=8\.0 is not supported; only 1\.0"),
    "no RoPE in some layers": ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]"),
    "chunked": (
        {"layer_types": ["chunked_attention", "full_attention"]},
        r"layer_types \['chunked_attention'\] are not supported|layer_types",
    ),
    "window": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "sliding_window=8 tokens: set max_model_len=8 instead of 64",
    ),
    "longrope": (
        rope("longrope", factor=4.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8),
        f"rope_type 'longrope' is {NEW_TYPES}",
    ),
    "su": (rope_4("su", factor=4.0), f"rope_type 'su' is {NEW_TYPES}"),
    "unknown type": (rope("spiral", factor=2.0), f"rope_type 'spiral' is {NEW_TYPES}"),
    "part of a head": (rope("default", partial_rotary_factor=0.5), "RoPE of a part of each head"),
    "three axes": (rope("default", mrope_section=[2, 3, 3]), "RoPE of a part of each head"),
    "no factor": (rope("linear"), "factor"),
    "negative factor": (rope("dynamic", factor=-2.0), r"factor of RoPE .*positive.* got -2\.0"),
    "factor as text": (rope("yarn", factor="4"), "factor of RoPE must be a positive number"),
    "llama3 factors": (
        rope("llama3", original_max_position_embeddings=32, **LLAMA3),
        r"high_freq_factor=1\.0 of RoPE must exceed low_freq_factor=4\.0",
    ),
    "NaN base": (rope("default", rope_theta=float("nan")), "rope_theta of RoPE .*got nan"),
    "base as text": (rope("default", rope_theta="1e4"), "rope_theta of RoPE .*got '1e4'"),
    "base before": ({"rope_theta": "1e4"}, "rope_theta must be a positive number, got '1e4'"),
    "base of one": (rope("yarn", rope_theta=1.0, factor=2.0), "rope_theta of RoPE must not be 1"),
    "infinite context": (rope("linear", factor=1e308), r"factor of RoPE .*got 1e\+308"),
    "RoPE as list": (
        {"rope_parameters": ["yarn"]},
        r"rope_parameters must be an object, got \[",
    ),
    "no base": (rope("default", rope_theta=0.0), r"rope_theta of RoPE .*got 0\.0"),
}


@pytest.fixture
def checkpoint(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """Makes a copy of the checkpoint that the test may damage."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))


@pytest.fixture
def no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if an engine goes as far as to make what loads weights and takes memory."""

    def fail(config: object) -> None:
        pytest.fail("not refused before memory is taken")

    monkeypatch.setattr(llm_engine, "make_runner", fail)


@pytest.mark.usefixtures("no_runner")
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_model_that_would_give_other_text(checkpoint: Path, case: str) -> None:
    changes, pattern = UNSUPPORTED[case]
    edit_json(checkpoint / "config.json", **({"layer_types": None} | changes))
    with pytest.raises(ValueError, match=pattern):
        make_llm(checkpoint, **SIZES)


@pytest.mark.usefixtures("no_runner")
@pytest.mark.parametrize(
    "field",
    ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "hidden_act",
     "max_position_embeddings", "rms_norm_eps", "num_attention_heads"],
)  # fmt: skip
def test_null_fields(checkpoint: Path, field: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {field: None}))
    with pytest.raises(ValueError, match=field):
        make_llm(checkpoint, **SIZES)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_fields_that_may_be_null(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, architecture, num_key_value_heads=4)
    config = json.loads((path / "config.json").read_text())
    absent = dict.fromkeys(("head_dim", "sliding_window", "rope_scaling"))
    (path / "config.json").write_text(json.dumps(config | absent))
    with make_llm(path, **SIZES) as llm:
        ids = greedy_ids(llm, [PROMPT], 4)
    assert ids == [HuggingFace(path).greedy(PROMPT, 4, stop=frozenset())]


def test_sliding_window_that_is_switched_off(checkpoint: Path) -> None:
    expected = [HuggingFace(checkpoint).greedy(PROMPT, 4, stop=frozenset())]
    changes = {"use_sliding_window": False, "sliding_window": 2, "max_window_layers": 0}
    edit_json(checkpoint / "config.json", layer_types=None, **changes)
    assert greedy_ids(make_llm(checkpoint, **SIZES), [PROMPT], 4) == expected


def test_sliding_window_as_long_as_sequences(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=24)
    expected = [HuggingFace(path).greedy(PROMPT, 21, stop=frozenset())]
    fix = "sliding_window=24 tokens: set max_model_len=24 instead of 25"
    with pytest.raises(ValueError, match=fix):
        make_llm(path, max_model_len=25)
    assert greedy_ids(make_llm(path, max_model_len=24), [PROMPT], 30) == expected


@pytest.mark.usefixtures("no_runner")
@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "num_attention_h",
        ),
        ({"intermediate_size": 95}, "intermediate_size"),
    ],
)
def test_shapes_that_two_ranks_cannot_share(
    checkpoint: Path, changes: dict[str, Any], pattern: str
) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(ValueError, match=pattern):
        make_llm(checkpoint, tensor_parallel_size=2, **SIZES)


CODE = """
from pathlib import Path
Path(__file__).with_name("was_run").touch()
Path("{marker}").touch()
"""


@pytest.mark.usefixtures("no_runner")
@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"architectures": ["OwnForCausalLM"]}, r"\['OwnForCausalLM'\] are not supported"),
        ({}, "cannot read .*config.json"),
    ],
)
def test_code_of_a_checkpoint_is_never_run(
    checkpoint: Path, changes: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = checkpoint / "marker"
    (checkpoint / "own.py").write_text(CODE.format(marker=marker))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_json(checkpoint / "config.json", model_type="own", auto_map=auto_map, **changes)

    def asked(*_: object) -> str:
        pytest.fail("asked on stdin")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match=pattern):
        make_llm(checkpoint, **SIZES)
    assert not marker.exists()


def test_a_dtype_of_the_user_comes_before_a_wrong_one(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", dtype="floaty", torch_dtype="float64")
    with make_llm(checkpoint, dtype="float32", **SIZES) as llm:
        assert llm.config.torch_dtype == torch.float32


def test_a_config_of_many_levels(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"cannot read .*config\.json: .*download"):
        make_llm(checkpoint, **SIZES)


def test_code_of_a_tokenizer_is_never_run(checkpoint: Path) -> None:
    marker = checkpoint / "marker"
    (checkpoint / "own.py").write_text(CODE.format(marker=marker))
    for name in ("processor_config.json", "preprocessor_config.json"):
        (checkpoint / name).write_text('{"auto_map": {"AutoProcessor": "own.OwnProcessor"}}')
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    edit_json(
        checkpoint / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map
    )
    with suppress(ValueError):  # some versions of transformers fall back on tokenizer.json
        make_llm(checkpoint, **SIZES).exit()
    assert not marker.exists()
