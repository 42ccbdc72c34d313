"""Tests which files of a directory are a checkpoint's weights, and how damaged ones are named."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.utils import checkpoint as checkpoint_module
from nanovllm.utils.checkpoint import Checkpoint, pieces
from nanovllm.utils.weight_files import weight_files
from tests.helpers.engines import make_llm

NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """Makes a copy of a tied checkpoint of one file that the test may change."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    return {name: tensor[:].clone() for name, tensor in checkpoint.tensors(checkpoint.names)}


def assert_same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = tensors_of(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def split_in_two(checkpoint: Path, *, with_index: bool) -> dict[str, torch.Tensor]:
    """Replaces the one file by two shards; returns all tensors."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    files = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors"
        for i, name in enumerate(sorted(tensors))
    }
    for shard in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == shard}, checkpoint / shard)
    if with_index:
        (checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tensors


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_beside_unrelated_files(checkpoint: Path, with_index: bool) -> None:
    expected = split_in_two(checkpoint, with_index=with_index)
    for name in (
        "consolidated.safetensors",
        ".model-00001-of-00002.safetensors",
        "._x.safetensors",
    ):
        save_file({NORM: torch.zeros(64)}, checkpoint / name)
    (checkpoint / "original").mkdir()
    save_file({NORM: torch.zeros(64)}, checkpoint / "original" / "model.safetensors")
    assert_same(checkpoint, expected)


def test_one_file_of_any_name_is_enough(checkpoint: Path) -> None:
    expected = tensors_of(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    (checkpoint / ".hidden.safetensors").write_bytes(b"")
    assert_same(checkpoint, expected)


def test_a_newer_single_file_comes_before_a_stale_index(checkpoint: Path) -> None:
    newer = {name: tensor + 1 for name, tensor in tensors_of(checkpoint).items()}
    split_in_two(checkpoint, with_index=True)
    save_file(newer, checkpoint / "model.safetensors", {"format": "pt"})
    assert_same(checkpoint, newer)
    for shard in checkpoint.glob("model-*"):  # their index alone is left
        shard.unlink()
    assert_same(checkpoint, newer)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(checkpoint: Path, with_index: bool) -> None:
    split_in_two(checkpoint, with_index=with_index)
    shard = checkpoint / "model-00002-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing.*download"):
        make_llm(checkpoint)
    shard.symlink_to(checkpoint / "blob-that-was-never-completed")
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing.*download"):
        make_llm(checkpoint)


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/tmp/other.safetensors", "sub/x.safetensors", "a\\b.safetensors",
     "C:x.safetensors", "..", "pytorch_model.bin", "", 5, None],
)  # fmt: skip
def test_an_index_cannot_lead_elsewhere(checkpoint: Path, name: object) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "other.safetensors")
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {NORM: name}}))
    with pytest.raises(ValueError, match=r"index\.json names .*no safetensors file of its direct"):
        weight_files(checkpoint)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": [1]}'])
def test_an_index_that_is_none(checkpoint: Path, content: str) -> None:
    split_in_two(checkpoint, with_index=False)
    (checkpoint / INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"cannot read .*index\.json.*download"):
        weight_files(checkpoint)


def test_an_interrupted_download(checkpoint: Path) -> None:
    cache = checkpoint / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (checkpoint / "model.safetensors").rename(cache / "model.safetensors.5e1f.incomplete")
    (checkpoint / "model.safetensors.incomplete").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file; download"):
        make_llm(checkpoint)
    (checkpoint / "model-00001-of-99999999999.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model-00002-of-99999999999\.safetensors is missing"):
        weight_files(checkpoint)


def test_a_message_about_a_header_is_cut(checkpoint: Path) -> None:
    header = json.dumps({"x" * 5000: {"dtype": "y" * 5000}}).encode()
    file = checkpoint / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="is not a complete safetensors file") as caught:
        make_llm(checkpoint)
    assert len(str(caught.value)) < 500 + len(str(file))


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model.safetensors.part")
    (checkpoint / ".model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file; download"):
        weight_files(checkpoint)
    (checkpoint / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file; download"):
        weight_files(checkpoint)


def test_a_tensor_in_two_shards(checkpoint: Path) -> None:
    split_in_two(checkpoint, with_index=True)
    shards = sorted(checkpoint.glob("model-*"))
    tensors = [load_file(shard) for shard in shards]
    first = next(iter(tensors[0]))
    save_file(tensors[1] | {first: tensors[0][first]}, shards[1])
    with pytest.raises(ValueError, match=r"is in both model-00001-of.* and model-00002-of") as e:
        make_llm(checkpoint)
    assert first in str(e.value)


@pytest.mark.parametrize(
    "damage", ["empty", "pointer", "header", "half", "one byte", "longer", "zeros"]
)
def test_a_damaged_file_is_named(checkpoint: Path, damage: str) -> None:
    split_in_two(checkpoint, with_index=True)
    file = checkpoint / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    damaged = {
        "empty": b"",
        "pointer": b"version https://git-lfs.github.com/spec/v1",
        "header": content[:100],
        "half": content[: len(content) // 2],
        "one byte": content[:-1],
        "longer": content + b"\0",
        "zeros": bytes(len(content)),  # as some programs allocate a file before they download it
    }
    file.write_bytes(damaged[damage])
    with pytest.raises(
        ValueError, match=r"00002-of-00002\.safetensors is not a complete.*download"
    ):
        make_llm(checkpoint)


def test_a_file_that_may_not_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = checkpoint / "model.safetensors"
    file.chmod(0)
    if os.access(file, os.R_OK):  # root may read every file

        def denied(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))

        monkeypatch.setattr(checkpoint_module, "safe_open", denied)
    with pytest.raises(ValueError, match=r"model\.safetensors .*denied"):
        make_llm(checkpoint)


def test_pieces_cover_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "PIECE_BYTES", 1000)
    for num_rows, num_bytes in [(0, 0), (1, 10_000), (7, 700), (100, 3200), (10, 100_000), (5, 0)]:
        slices = list(pieces(num_rows, num_bytes))
        assert [i for s in slices for i in range(num_rows)[s]] == list(range(num_rows))
        most = max(1000 * num_rows // max(num_bytes, 1), 1)
        assert all(s.stop - s.start <= most for s in slices)


def test_small_pieces_and_many_openings_give_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = split_in_two(checkpoint, with_index=True)
    with make_llm(checkpoint) as llm:
        texts = llm.generate(["list all", "introduce"], use_tqdm=False)
    monkeypatch.setattr(checkpoint_module, "PIECE_BYTES", 500)
    monkeypatch.setattr(checkpoint_module, "MAX_MAPPED_BYTES", 1000)
    assert_same(checkpoint, expected)
    with make_llm(checkpoint) as llm:
        assert llm.generate(["list all", "introduce"], use_tqdm=False) == texts
