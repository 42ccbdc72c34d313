"""Tests model ids: the local cache, what is downloaded, and what is said when that fails. The hub
is replaced at the library's boundary."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.utils.hub import UNWANTED, WANTED, checkpoint_dir
from tests.helpers.engines import SIZES, greedy_ids, make_llm

MODEL = "some-org/Tiny-0.1B"
COMMIT, OLDER = "a" * 40, "b" * 40
PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test an empty cache, and a hub that is not offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


def add_to_cache(
    cache: Path, source: Path, commit: str = COMMIT, ref: str = "main", leave_out: str = ""
) -> Path:
    """Lays files out as the library does: blobs, and snapshots of links to them."""
    root = cache / ("models--" + MODEL.replace("/", "--"))
    snapshot = root / "snapshots" / commit
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    for file in source.iterdir():
        if file.name != leave_out:
            blob = root / "blobs" / f"{commit[0]}-{file.name}"
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records calls for downloads, which fail the test unless it replaces `answer`."""
    return []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]) -> Callable[[Any], None]:
    """Makes the hub answer with a path, or an exception; the local cache is the library's own."""
    local = huggingface_hub.snapshot_download

    def set_answer(answer: Path | Exception) -> None:
        def download(model: str, *, local_files_only: bool, **options: Any) -> str:
            if local_files_only:
                return str(local(model, local_files_only=True, **options))
            calls.append({"model": model} | options)
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return set_answer


def http_error(kind: type[Exception]) -> Exception:
    """Makes an error of the hub without the HTTP response that its constructor asks for."""
    error = kind.__new__(kind)
    Exception.__init__(error, "response of the hub")
    return error


def test_a_directory_comes_first(
    tiny_qwen3: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_to_cache(cache, tiny_qwen3)
    shutil.copytree(tiny_qwen3, tmp_path / MODEL)
    assert checkpoint_dir(MODEL, None) == Path(MODEL)
    with pytest.raises(ValueError, match=r"revision='main' is for model ids.*is a directory"):
        Config(MODEL, device="cpu", revision="main")


def test_the_cache_is_used_without_the_hub(
    tiny_qwen3: Path, cache: Path, hub: Any, calls: list[dict[str, Any]]
) -> None:
    hub(AssertionError("asked the hub"))
    snapshot = add_to_cache(cache, tiny_qwen3)
    with make_llm(tiny_qwen3) as llm:
        expected = greedy_ids(llm, [PROMPT], 4)
    with LLM(MODEL, device="cpu", **SIZES) as llm:
        assert llm.config.model == str(snapshot)
        assert llm.tokenizer is not None
        assert greedy_ids(llm, [PROMPT], 4) == expected
    assert calls == []


def test_revisions(tiny_qwen3: Path, cache: Path, hub: Any) -> None:
    hub(AssertionError("asked the hub"))
    newer = add_to_cache(cache, tiny_qwen3)
    older = add_to_cache(cache, tiny_qwen3, OLDER, "v1.0")
    assert checkpoint_dir(MODEL, None) == checkpoint_dir(MODEL, COMMIT) == newer
    assert checkpoint_dir(MODEL, "v1.0") == checkpoint_dir(MODEL, OLDER) == older
    assert Config(MODEL, device="cpu", revision="v1.0").model == str(older)


def test_what_is_not_cached_is_downloaded(
    tiny_qwen3: Path, hub: Any, calls: list[dict[str, Any]]
) -> None:
    hub(tiny_qwen3)
    assert checkpoint_dir(MODEL, "v2") == tiny_qwen3
    (call,) = calls
    assert call["model"] == MODEL
    assert call["revision"] == "v2"
    assert (call["allow_patterns"], call["ignore_patterns"]) == (WANTED, UNWANTED)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_interrupted_download_is_completed(
    missing: str, tiny_qwen3: Path, cache: Path, hub: Any, calls: list[dict[str, Any]]
) -> None:
    add_to_cache(cache, tiny_qwen3, leave_out=missing)
    hub(tiny_qwen3)
    assert checkpoint_dir(MODEL, None) == tiny_qwen3
    assert len(calls) == 1


def test_a_link_to_a_blob_that_is_gone(
    tiny_qwen3: Path, cache: Path, hub: Any, calls: list[dict[str, Any]]
) -> None:
    snapshot = add_to_cache(cache, tiny_qwen3)
    (snapshot / "model.safetensors").resolve().unlink()
    hub(tiny_qwen3)
    assert checkpoint_dir(MODEL, None) == tiny_qwen3
    assert len(calls) == 1


def test_only_needed_files_are_fetched() -> None:
    wanted = [
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "vocab.json",
        "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    ]  # fmt: skip
    others = [
        "README.md", "LICENSE.txt", "pytorch_model.bin", "original/consolidated.00.pth",
        "original/params.json", "original/tokenizer.model", "consolidated.safetensors",
        "onnx/model.onnx", "onnx/config.json", "modeling_own.py", "flax_model.msgpack",
        "adapter_model.safetensors", "model.gguf", "figures/speed.png",
    ]  # fmt: skip
    kept = filter_repo_objects(wanted + others, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    assert list(kept) == wanted


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (http_error(errors.GatedRepoError), "restricted.*huggingface.co/some-org/Tiny.*auth login"),
        (http_error(errors.RepositoryNotFoundError), "no such model, or it is private"),
        (http_error(errors.RevisionNotFoundError), "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), "hub cannot be reached, and it is not in the local"),
        (ConnectionResetError("reset by peer"), "ConnectionResetError: reset by peer"),
    ],
)
def test_what_failed_is_said(error: Exception, pattern: str, hub: Any) -> None:
    hub(error)
    start = f"^model directory '{MODEL}' does not exist, and the model id .*cannot be downloaded: "
    with pytest.raises(ValueError, match=start + f".*{pattern}"):
        Config(MODEL, device="cpu", revision="v9")


def test_offline(monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, cache: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE forbids.*unset HF_HUB_OFFLINE, or downl"):
        checkpoint_dir(MODEL, None)
    snapshot = add_to_cache(cache, tiny_qwen3)
    assert checkpoint_dir(MODEL, None) == snapshot
    (snapshot / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json|HF_HUB_OFFLINE forbids"):
        checkpoint_dir(MODEL, None)


@pytest.mark.parametrize("model", ["./nowhere", "/no/where", "~/no-such-dir", "a/b/c", "", "../x"])
def test_paths_are_no_ids(model: str, hub: Any, calls: list[dict[str, Any]]) -> None:
    hub(AssertionError("asked the hub"))
    with pytest.raises(
        ValueError, match=r"model directory .* (does not exist|has no config).*downl"
    ):
        checkpoint_dir(model, None)
    with pytest.raises(ValueError, match="does not exist"):
        checkpoint_dir(Path("no/where"), None)
    assert calls == []


@pytest.mark.parametrize("revision", [5, b"main", True])
def test_revision_of_wrong_type(revision: Any) -> None:
    with pytest.raises(TypeError, match=f"revision must be a str or None, got {revision!r}"):
        Config(MODEL, device="cpu", revision=revision)
