"""The engine's knobs. Each is checked here, before anything is built."""

import copy
import difflib
import importlib.util
import logging
import re
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.layers.rope_scaling import DynamicNTKScaling, max_context, read_rope
from nanovllm.models.hf_config import read_hf_config, tie_flag
from nanovllm.models.supported import check_sizes
from nanovllm.sampling_params import MAX_SEED
from nanovllm.utils.hub import checkpoint_dir

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_CACHE_DTYPES = ("auto", "fp8")
BOOLEANS = ("enforce_eager", "autotune_matmul", "enable_prefix_caching")
MAX_NUM_BATCHED_TOKENS = {"cuda": 16384, "cpu": 1024}  # a step of so many takes a second or two


@dataclass(slots=True)
class Config:
    """What an engine is made with. Bad values raise `ValueError` or `TypeError` with the fix.

    model: checkpoint directory with config.json and *.safetensors, or else a model id of the
        Hugging Face hub, which is downloaded unless the local cache has it.
    max_num_batched_tokens: most tokens that one step computes; decoding comes first, prompts take
        the rest. -1 is 16384 on a GPU and 1024 on a CPU.
    max_num_seqs: most sequences that are resident at a time, hence the largest decode batch.
    max_model_len: most tokens of prompt plus completion; at most the model's own context, its RoPE
        scaling included, to which a larger value is capped with a warning.
    gpu_memory_utilization: the fraction of the GPU's memory that this engine may use, in (0, 1].
    tensor_parallel_size: how many GPUs (cuda:0 and on) or CPU processes share the model.
    enforce_eager: True captures no CUDA graphs.
    autotune_matmul: True measures which matmuls are fastest in the captured decode steps; False
        takes torch's own.
    kvcache_block_size: tokens of a K/V block, a power of two.
    num_kvcache_blocks: blocks of the K/V pool; -1 takes what the memory allows.
    kv_cache_dtype: "auto" keeps K and V in the model's dtype, "fp8" in 8 bits and scales, which
        makes room for nearly twice the tokens of a half-precision model: docs/fp8_kv_cache.md.
    device: "auto" is a CUDA GPU if there is one, else the CPU.
    dtype: "auto" is the checkpoint's.
    attention_backend: "auto" is the fastest that can serve the model.
    seed: keys the sampling noise of requests that have no seed of their own.
    enable_prefix_caching: True reuses the K/V of prompts that start alike.
    async_scheduling: True launches a step before the ids of the one before it are read. "auto" does
        so on a GPU; on a CPU, which computes a step while it launches it, that brings nothing.
    revision: branch, tag or commit of a model id; None is its main branch.

    Derived are `hf_config`, `tie_word_embeddings` (None where config.json has no such flag),
    `torch_device` and `torch_dtype`.
    """

    model: str
    max_num_batched_tokens: int = -1
    max_num_seqs: int = 512
    max_model_len: int = 4096
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    autotune_matmul: bool = True
    kvcache_block_size: int = 256
    num_kvcache_blocks: int = -1
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    dtype: str | torch.dtype = "auto"
    attention_backend: str = "auto"
    seed: int = 0
    enable_prefix_caching: bool = True
    async_scheduling: bool | str = "auto"
    revision: str | None = None
    hf_config: PretrainedConfig = field(init=False, repr=False)
    tie_word_embeddings: bool | None = field(init=False)
    torch_device: torch.device = field(init=False)
    torch_dtype: torch.dtype = field(init=False)

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: Any) -> "Config":
        """Makes a `Config`; the `TypeError` about an unknown keyword suggests the near match."""
        known = [f.name for f in fields(cls) if f.init and f.name != "model"]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise TypeError(f"LLM() got an unknown keyword {name!r}; {hint}")
        return cls(model, **kwargs)

    def __post_init__(self) -> None:
        self._check_knobs()
        self.model = str(checkpoint_dir(self.model, self.revision))
        self.hf_config = read_hf_config(self.model)
        self.tie_word_embeddings = tie_flag(self.model)
        self.torch_device = _resolve_device(self.device)
        if self.tensor_parallel_size > 1 and self.torch_device.type == "cuda":
            self._check_gpus()
            self.torch_device = torch.device("cuda", 0)
        self.torch_dtype = _resolve_dtype(self.dtype, self.hf_config)
        if self.max_num_batched_tokens == -1:
            self.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS[self.torch_device.type]
        if self.async_scheduling == "auto":
            self.async_scheduling = self.torch_device.type == "cuda"
        self._cap_max_model_len()

    @property
    def max_blocks_per_seq(self) -> int:
        """The number of K/V blocks that a request of `max_model_len` tokens takes."""
        return -(-self.max_model_len // self.kvcache_block_size)

    @property
    def is_kv_quantised(self) -> bool:
        """Whether K and V are kept as codes and scales."""
        return self.kv_cache_dtype == "fp8"

    @property
    def kv_torch_dtype(self) -> torch.dtype:
        """The dtype of what the K/V pool holds per element: numbers, or codes."""
        return torch.uint8 if self.is_kv_quantised else self.torch_dtype

    def on_rank(self, rank: int) -> "Config":
        """Returns a copy for another rank; rank r runs on cuda:r."""
        config = copy.copy(self)
        if self.torch_device.type == "cuda":
            config.torch_device = torch.device("cuda", rank)
        return config

    def _check_gpus(self) -> None:
        size, num_gpus = self.tensor_parallel_size, torch.cuda.device_count()
        if num_gpus < size:
            raise ValueError(
                f"tensor_parallel_size={size}, but torch sees {num_gpus} GPUs; "
                f"use at most {num_gpus}, or device='cpu'"
            )
        if self.device not in ("auto", "cuda", "cuda:0"):
            raise ValueError(
                f"device={self.device!r} with tensor_parallel_size={size}, which takes cuda:0 to "
                f"cuda:{size - 1}; use device='cuda', and CUDA_VISIBLE_DEVICES to choose the GPUs"
            )

    def _check_knobs(self) -> None:
        if self.max_num_batched_tokens != -1:
            _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_int("max_num_seqs", self.max_num_seqs, 1)
        _check_int("max_model_len", self.max_model_len, 2)
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1, 8)
        _check_int("kvcache_block_size", self.kvcache_block_size, 1)
        _check_int("num_kvcache_blocks", self.num_kvcache_blocks, -1)
        _check_int("seed", self.seed, 0, MAX_SEED)
        if self.num_kvcache_blocks == 0:
            raise ValueError("num_kvcache_blocks must be >= 1, or -1 to measure, got 0")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, int | float):
            raise TypeError(f"gpu_memory_utilization must be a number, got {utilization!r}")
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {utilization}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be 'auto' or 'fp8', got {self.kv_cache_dtype!r}")
        if not isinstance(self.attention_backend, str):
            raise TypeError(f"attention_backend must be a str, got {self.attention_backend!r}")
        if self.revision is not None and not isinstance(self.revision, str):
            raise TypeError(f"revision must be a str or None, got {self.revision!r}")
        for name in BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.async_scheduling, bool) and self.async_scheduling != "auto":
            raise TypeError(
                f"async_scheduling must be True or False, or 'auto', got {self.async_scheduling!r}"
            )

    def _cap_max_model_len(self) -> None:
        check_sizes(self.hf_config)
        limit = max_context(self.hf_config)
        if self.max_model_len > limit:
            logger.warning(
                "max_model_len=%d exceeds the model's max_position_embeddings, RoPE scaling "
                "included; using %d",
                self.max_model_len,
                limit,
            )
            self.max_model_len = limit
        own = self.hf_config.max_position_embeddings
        if self.max_model_len > own and isinstance(
            read_rope(self.hf_config).scaling, DynamicNTKScaling
        ):
            logger.warning(
                "rope_type 'dynamic' with max_model_len=%d: all sequences are rotated as Hugging "
                "Face rotates one of so many tokens; max_model_len=%d rotates them as it rotates "
                "short ones",
                self.max_model_len,
                own,
            )


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def _resolve_device(device: object) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if device == "cpu":
        return torch.device("cpu")
    if not has_cuda:
        raise ValueError(f"device={device!r}, but torch sees no CUDA GPU; use 'cpu' or 'auto'")
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"device={str(device)!r} needs the package triton, which is not installed; "
            "pip install triton, or use device='cpu'"
        )
    index = int(device[5:]) if device[5:] else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def _resolve_dtype(dtype: object, hf_config: PretrainedConfig) -> torch.dtype:
    resolved = DTYPES.get(str(dtype).removeprefix("torch."))
    if resolved is not None:
        return resolved
    if dtype != "auto":
        raise ValueError(f"dtype must be 'auto' or one of {', '.join(DTYPES)}, got {dtype!r}")
    # transformers 4.x calls it torch_dtype, 5.x dtype; either may be absent or a string.
    name = "dtype" if hasattr(hf_config, "dtype") else "torch_dtype"
    own = str(getattr(hf_config, name, None)).removeprefix("torch.")
    resolved = DTYPES.get("bfloat16" if own == "None" else own)
    if resolved is None:
        raise ValueError(
            f"dtype must be one of {', '.join(DTYPES)}, but the checkpoint's is {own!r}; pass "
            "another, e.g. dtype='bfloat16'"
        )
    return resolved
