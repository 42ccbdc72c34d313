"""Which attention backend serves an engine."""

from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend

NAMES = ("torch",)


def select_backend(name: str, *, block_size: int) -> AttentionBackend:
    """The named backend, or for "auto" the fastest that can serve the given layout."""
    if name not in ("auto", *NAMES):
        raise ValueError(f"attention_backend must be 'auto' or one of {NAMES}, got {name!r}")
    if block_size & (block_size - 1):
        raise ValueError(
            f"kvcache_block_size={block_size} does not suit attention backend 'torch', which needs "
            "a power of two; use e.g. 256"
        )
    return TorchBackend()
