"""Finds the directory of a checkpoint: a path, or a model id of the Hugging Face hub.

A directory is always taken as such. An id takes the snapshot in the local cache if it is complete,
and is downloaded otherwise. Only files that an engine reads are fetched.
"""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from nanovllm.utils.shown import cut, shown
from nanovllm.utils.weight_files import weight_files

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# Folders, such as original/ and onnx/, and weights of the same model in another format.
UNWANTED = ["*/*", "consolidated*", "adapter_*", "training_args*"]
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HOW = (
    "download one, e.g. `hf download Qwen/Qwen3-0.6B --local-dir ~/huggingface/Qwen3-0.6B`, "
    "and pass its directory"
)


def checkpoint_dir(model: object, revision: str | None) -> Path:
    """Returns the directory of a checkpoint, which may be downloaded for it.

    revision: a branch, tag or commit of a model id; None is its main branch.

    Raises `ValueError` with the fix if there is no complete checkpoint.
    """
    if not isinstance(model, str | Path):
        raise TypeError(
            f"model must be the path of a checkpoint directory or a model id, got {shown(model)}"
        )
    try:
        path = Path(model).expanduser()
        is_directory = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name of too many characters, no such home
        raise ValueError(f"model directory {shown(model)} cannot be: {cut(error)}; {HOW}") from None
    if is_directory:
        if revision is not None:
            raise ValueError(
                f"revision={shown(revision)} is for model ids, but {str(path)!r} is a directory; "
                "leave it out"
            )
        check_complete(path)
        return path
    if not isinstance(model, str) or not _MODEL_ID.fullmatch(model):
        raise ValueError(f"model directory {shown(str(path))} does not exist; {HOW}")
    return _cached(model, revision) or _downloaded(model, revision)


def check_complete(path: Path) -> None:
    """Raises `ValueError` if a directory lacks a config or weights."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model directory {str(path)!r} has no config.json; {HOW}")
    weight_files(path)


def _cached(model: str, revision: str | None) -> Path | None:
    """Returns the snapshot in the local cache, or None if there is none or it is incomplete."""
    try:
        path = _snapshot(model, revision, local_files_only=True)
        check_complete(path)
    except (OSError, ValueError):
        return None
    return path


def _downloaded(model: str, revision: str | None) -> Path:
    try:
        path = _snapshot(model, revision, local_files_only=False)
    except Exception as error:  # of whatever kind the library and its HTTP client raise
        raise ValueError(
            f"model directory {shown(model)} does not exist, and the model id {shown(model)} "
            f"cannot be downloaded: {_reason(error, model, revision)}"
        ) from error
    check_complete(path)
    return path


def _snapshot(model: str, revision: str | None, *, local_files_only: bool) -> Path:
    return Path(
        huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            local_files_only=local_files_only,
        )
    )


def _reason(error: Exception, model: str, revision: str | None) -> str:
    """Says what failed, with the fix."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return (
            "it is not (completely) in the local cache, and HF_HUB_OFFLINE forbids to look "
            f"elsewhere; unset HF_HUB_OFFLINE, or {HOW}"
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"access to it is restricted; ask for it on https://huggingface.co/{model} and log in "
            "with `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {shown(revision)}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no such model, or it is private; check the name, log in with "
            f"`hf auth login`, or {HOW}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"the hub cannot be reached, and it is not in the local cache; or {HOW}"
    return f"{type(error).__name__}: {error}"
