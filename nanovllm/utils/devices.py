"""Resolves what users and checkpoints call devices and dtypes."""

import importlib.util
import re

import torch

from nanovllm.utils.shown import shown

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(device: object) -> torch.device:
    """Returns the device that an engine computes on; `ValueError` if it cannot."""
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {shown(device)}")
    if device == "cpu":
        return torch.device("cpu")
    if not has_cuda:
        raise ValueError(f"device={shown(device)}, but torch sees no CUDA GPU; use 'cpu' or 'auto'")
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"device={str(device)!r} needs the package triton, which is not installed; "
            "pip install triton, or use device='cpu'"
        )
    index = int(device[5:]) if device[5:] else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={shown(device)}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def resolve_dtype(dtype: object, own: object) -> torch.dtype:
    """Returns the dtype that an engine computes in.

    own: what the checkpoint's config.json says; None if it does not.
    """
    known = ", ".join(DTYPES)
    if dtype != "auto":
        resolved = _known_dtype(dtype)
        if resolved is None:
            raise ValueError(f"dtype must be 'auto' or one of {known}, got {shown(dtype)}")
        return resolved
    resolved = _known_dtype("bfloat16" if own is None else own)
    if resolved is None:
        raise ValueError(
            f"dtype must be one of {known}, but in config.json the checkpoint's is {shown(own)}; "
            "pass another, e.g. dtype='bfloat16'"
        )
    return resolved


def _known_dtype(value: object) -> torch.dtype | None:
    is_dtype = isinstance(value, str | torch.dtype)
    return DTYPES.get(str(value).removeprefix("torch.")) if is_dtype else None
