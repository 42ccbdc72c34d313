"""Tests loading checkpoints that do and do not match their config, and what each rank reads."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.layers.cpu_weights import plain
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils import loading_progress
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import PackedModules, load_model
from tests.helpers.checkpoints import edit_json, make_checkpoint
from tests.helpers.closeness import assert_close, assert_logits_close
from tests.helpers.engines import make_llm
from tests.helpers.reference import HuggingFace, next_token_logits

Tensors = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
PROMPT = [5, 300, 17, 222, 80, 9, 411]


@pytest.fixture
def checkpoint(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """Makes a copy of a tied checkpoint of one file that the test may change."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))


def edit_tensors(checkpoint: Path, edit: Callable[[Tensors], object]) -> Tensors:
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    return tensors


def logits_of(checkpoint: Path, **config: Any) -> torch.Tensor:
    with make_llm(checkpoint, **config) as llm:
        return next_token_logits(llm, [PROMPT])[0]


def model_of(llm: LLM) -> Any:
    assert llm._runner is not None
    return llm._runner.model


@pytest.mark.parametrize("name", ["model.norm.weight", EMBEDDING, Q_PROJ])
def test_missing_tensor(checkpoint: Path, name: str) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"lacks tensors that its config asks for: {name}$"):
        make_llm(checkpoint)


def test_unknown_tensor(checkpoint: Path) -> None:
    derived = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.cos_cached"]
    scale = f"{Q_PROJ}_scale"
    expected = logits_of(checkpoint)
    edit_tensors(checkpoint, lambda t: t.update({name: torch.ones(8) for name in derived}))
    assert torch.equal(logits_of(checkpoint), expected)
    edit_tensors(checkpoint, lambda tensors: tensors.update({scale: torch.ones(1)}))
    with pytest.raises(ValueError, match=f"does not know: {scale}; quantized"):
        make_llm(checkpoint)


@pytest.mark.parametrize(
    ("name", "shape", "asked"),
    [
        ("model.norm.weight", [32], [64]),
        (Q_PROJ, [32, 64], [64, 64]),
        ("model.layers.0.mlp.down_proj.weight", [96, 64], [64, 96]),
        (EMBEDDING, [512, 32], [512, 64]),
    ],
)
def test_wrong_shape(checkpoint: Path, name: str, shape: list[int], asked: list[int]) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: torch.ones(shape)}))
    with pytest.raises(ValueError, match=f"cannot load tensor '{name}'") as caught:
        make_llm(checkpoint)
    assert f"its shape is {shape}, the config asks for {asked}" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool], ids=str)
def test_wrong_dtype(checkpoint: Path, dtype: torch.dtype) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.ones(64, 64).to(dtype)}))
    with pytest.raises(ValueError, match=f"tensor '{Q_PROJ}': dtype .* is not supported, as quant"):
        make_llm(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_weights_of_another_dtype_are_converted(checkpoint: Path, dtype: torch.dtype) -> None:
    def convert(tensors: Tensors) -> None:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}

    tensors = edit_tensors(checkpoint, convert)
    with make_llm(checkpoint) as llm:
        assert llm.config.torch_dtype == torch.float32
        embedding = plain(model_of(llm).model.embed_tokens.weight)
        assert torch.equal(embedding, tensors[EMBEDDING].float())


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("float64", "dtype must be one of float32.*checkpoint's is 'float64'; pass .*dtype='bf"),
        ("float8_e4m3fn", "dtype must be one of .*'float8_e4m3fn'"),
        ("bf16", "bf16"),
    ],
)
def test_dtype_of_the_config(checkpoint: Path, name: str, pattern: str) -> None:
    edit_json(checkpoint / "config.json", dtype=name, torch_dtype=name)
    with pytest.raises(ValueError, match=pattern):
        make_llm(checkpoint)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype", None])
def test_dtype_of_the_config_in_either_spelling(checkpoint: Path, name: str | None) -> None:
    """A config without one means bfloat16."""
    given = {"dtype": None, "torch_dtype": None} | ({name: "float16"} if name else {})
    edit_json(checkpoint / "config.json", **given)
    expected = torch.float16 if name else torch.bfloat16
    assert Config(str(checkpoint), device="cpu").torch_dtype == expected


def test_tied_with_an_identical_head(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits_of(checkpoint)
    edit_tensors(checkpoint, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    llm = make_llm(checkpoint)
    head, embedding = model_of(llm).lm_head.weight, model_of(llm).model.embed_tokens.weight
    assert head is embedding or torch.equal(plain(head), embedding)
    assert torch.equal(next_token_logits(llm, [PROMPT])[0], expected)
    assert "differs from the embedding" not in caplog.text


def test_tied_with_another_head(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = edit_tensors(checkpoint, lambda t: t.update({HEAD: t[EMBEDDING].flip(0).clone()}))
    with make_llm(checkpoint) as llm:
        assert torch.equal(plain(model_of(llm).lm_head.weight), tensors[HEAD])
        assert torch.equal(model_of(llm).model.embed_tokens.weight, tensors[EMBEDDING])
    (record,) = [r for r in caplog.records if "differs from the embedding" in r.message]
    assert record.levelno == logging.WARNING
    kept = logits_of(checkpoint)
    edit_json(checkpoint / "config.json", tie_word_embeddings=False)
    assert_logits_close(kept, HuggingFace(checkpoint).last_logits(PROMPT))
    assert torch.equal(kept, logits_of(checkpoint))


def test_untied_without_a_head(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=f"lacks tensors that its config asks for: {HEAD}$"):
        make_llm(checkpoint)


def test_no_tie_flag(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the flag, whether there is a head decides."""
    expected = logits_of(checkpoint)
    edit_json(checkpoint / "config.json", tie_word_embeddings=None)
    assert torch.equal(logits_of(checkpoint), expected)
    assert "neither tie_word_embeddings nor lm_head.weight is there" in caplog.text
    tensors = edit_tensors(checkpoint, lambda t: t.update({HEAD: t[EMBEDDING].flip(0).clone()}))
    with make_llm(checkpoint) as llm:
        assert torch.equal(plain(model_of(llm).lm_head.weight), tensors[HEAD])


def test_bfloat16_checkpoint(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    with make_llm(checkpoint) as llm:
        for param in model_of(llm).parameters():
            # Those in oneDNN's layout, and those that are added to activations in fp32, may be so.
            may_be_wide = param.is_mkldnn or param.dim() == 1
            assert param.dtype in (torch.bfloat16, torch.float32)[: 1 + may_be_wide]
    with make_llm(checkpoint, dtype="float32") as llm:
        assert {param.dtype for param in model_of(llm).parameters()} == {torch.float32}
        logits = next_token_logits(llm, [PROMPT])[0]
    assert_logits_close(logits, HuggingFace(checkpoint).last_logits(PROMPT))


def test_max_model_len_is_capped(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_json(checkpoint / "config.json", max_position_embeddings=48)
    assert make_llm(checkpoint, max_model_len=48).config.max_model_len == 48
    assert "max_model_len" not in caplog.text
    assert make_llm(checkpoint, max_model_len=49).config.max_model_len == 48
    assert "max_model_len=49 exceeds" in caplog.text
    assert "using 48" in caplog.text


def by_checkpoint_name(model: nn.Module, mapping: PackedModules) -> Tensors:
    """Returns one rank's parameters by their names in the checkpoint, with packed ones split: q, k
    and v are 2 : 1 : 1, gate and up 1 : 1."""
    tensors: Tensors = {}
    for name, param in model.named_parameters():
        *parents, module, kind = name.split(".")
        parts = mapping.get(module, (module,))
        param = plain(param)
        quarter = param.shape[0] // 4
        sizes = {1: [4 * quarter], 2: [2 * quarter] * 2, 3: [2 * quarter, quarter, quarter]}
        pieces = torch.split(param.data, sizes[len(parts)])
        for part, piece in zip(parts, pieces, strict=True):
            tensors[".".join([*parents, part, kind])] = piece
    return tensors


def test_pieces_of_two_ranks_make_up_the_checkpoint(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, attention_bias=True, tie_word_embeddings=False)
    config, mapping = AutoConfig.from_pretrained(path), Qwen3ForCausalLM.packed_modules_mapping
    ranks = []
    for rank in range(2):
        model = Qwen3ForCausalLM(config, TPGroup(rank, 2), tie_word_embeddings=False)
        load_model(model, Checkpoint(path), mapping)
        ranks.append(by_checkpoint_name(model, mapping))
    tensors = load_file(path / "model.safetensors")
    assert ranks[0].keys() == ranks[1].keys() == tensors.keys()
    for name, tensor in tensors.items():
        first, second = ranks[0][name], ranks[1][name]
        is_row_parallel = "o_proj" in name or "down_proj" in name
        if "norm" in name or (is_row_parallel and "bias" in name):
            assert torch.equal(first, tensor), name
            assert torch.equal(second, tensor), name
        else:
            whole = torch.cat((first, second), dim=int(is_row_parallel))
            assert torch.equal(whole, tensor), name


class PartialSums(TPGroup):
    """Is a rank without peers whose all-reduce returns the rank's own summand."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_partial_sums_of_two_ranks_add_up() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(3, 8)
    ids = torch.tensor([0, 5, 2, 3])
    row_parallel, embedded = torch.zeros(3, 6), torch.zeros(4, 8)
    for rank in range(2):
        linear = RowParallelLinear(PartialSums(rank, 2), 8, 6, bias=True)
        linear.load_state_dict({"weight": weight.chunk(2, dim=1)[rank], "bias": bias})
        row_parallel += linear(x.chunk(2, dim=1)[rank])
        embedding = VocabParallelEmbedding(PartialSums(rank, 2), 6, 8)
        embedding.load_state_dict({"weight": weight.chunk(2)[rank]})
        embedded += embedding(ids)
    assert_close(row_parallel, F.linear(x, weight, bias), num_eps=16)
    assert torch.equal(embedded, weight[ids])


@pytest.mark.parametrize("kind", ["single", "merged", "qkv"])
def test_column_parallel_results_of_two_ranks_make_up_the_whole(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    sizes: dict[str | None, int] = {
        "single": {None: 12},
        "merged": {"gate_proj": 6, "up_proj": 4},
        "qkv": {"q_proj": 8, "k_proj": 4, "v_proj": 4},
    }[kind]
    sources = {part: (torch.randn(n, 8), torch.randn(n)) for part, n in sizes.items()}
    shares: list[list[torch.Tensor]] = []
    for rank in range(2):
        group = TPGroup(rank, 2)
        if kind == "single":
            layer = ColumnParallelLinear(group, 8, 12, bias=True)
        elif kind == "merged":
            parts = {"gate_proj": 6, "up_proj": 4}
            layer = MergedColumnParallelLinear(group, 8, parts, bias=True)
        else:
            shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 2}
            layer = QKVParallelLinear(group, 8, bias=True, **shape)
        assert isinstance(layer, ColumnParallelLinear)
        for part, tensors in sources.items():
            for param, tensor in zip((layer.weight, layer.bias), tensors, strict=True):
                param.weight_loader(param, tensor, part)
        shares.append(list(layer(x).split([size // 2 for size in sizes.values()], dim=-1)))
    for (weight, bias), *of_ranks in zip(sources.values(), *shares, strict=True):
        assert_close(torch.cat(of_ranks, dim=-1), F.linear(x, weight, bias), num_eps=16)
    with pytest.raises(ValueError, match="13"):
        ColumnParallelLinear(TPGroup(0, 2), 8, 13)


def test_a_load_of_some_seconds_shows_its_progress(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llm(checkpoint).exit()
    assert "Loading weights" not in capsys.readouterr().err
    monkeypatch.setattr(loading_progress, "PROGRESS_SECONDS", 0)
    make_llm(checkpoint).exit()
    assert "Loading weights: 100%" in capsys.readouterr().err
