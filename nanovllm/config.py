"""The engine's knobs. Each is checked here, before anything is built."""

import copy
import difflib
import logging
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.layers.rope_scaling import DynamicNTKScaling, max_context, read_rope
from nanovllm.models.config_fields import check_sizes
from nanovllm.models.hf_config import read_config
from nanovllm.sampling_params import MAX_SEED
from nanovllm.utils.devices import resolve_device, resolve_dtype
from nanovllm.utils.hub import checkpoint_dir
from nanovllm.utils.shown import shown

logger = logging.getLogger("nanovllm")

MOST = {  # -> the largest value that is no mistake
    "max_num_batched_tokens": 2**31 - 1,
    "max_num_seqs": 65_535,  # programs of a CUDA grid along all but its first axis
    "max_model_len": 2**31 - 1,
    "kvcache_block_size": 2**31 - 1,
    "num_kvcache_blocks": 2**31 - 1,
}
KV_CACHE_DTYPES = ("auto", "fp8")
BOOLEANS = ("enforce_eager", "autotune_matmul", "enable_prefix_caching", "request_metrics")
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
        Those of engines that share a GPU should not exceed 1 together: the construction of one
        returns the idle working memory of the others to the GPU, and may take it.
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
    request_metrics: True adds to each result how long its request queued, waited for its first
        token, and took.
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
    request_metrics: bool = False
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
                raise TypeError(f"LLM() got an unknown keyword {shown(name)}; {hint}")
        return cls(model, **kwargs)

    def __post_init__(self) -> None:
        self._check_knobs()
        self.model = str(checkpoint_dir(self.model, self.revision))
        content = read_config(self.model)
        self.hf_config = content.hf_config
        self.tie_word_embeddings = content.tie_word_embeddings
        self.torch_device = resolve_device(self.device)
        if self.tensor_parallel_size > 1 and self.torch_device.type == "cuda":
            self._check_gpus()
            self.torch_device = torch.device("cuda", 0)
        self.torch_dtype = resolve_dtype(self.dtype, content.dtype)
        if self.max_num_batched_tokens == -1:
            self.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS[self.torch_device.type]
        if self.async_scheduling == "auto":
            self.async_scheduling = self.torch_device.type == "cuda"
        self._cap_max_model_len()
        self._check_pool()

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
                f"device={shown(self.device)} with tensor_parallel_size={size}, which takes "
                f"cuda:0 to cuda:{size - 1}; use device='cuda', and CUDA_VISIBLE_DEVICES to choose "
                "the GPUs"
            )

    def _check_knobs(self) -> None:
        if self.max_num_batched_tokens != -1:
            _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_int("max_num_seqs", self.max_num_seqs, 1)
        _check_int("max_model_len", self.max_model_len, 2)
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1, 8)
        _check_int("kvcache_block_size", self.kvcache_block_size, 1)
        _check_int("num_kvcache_blocks", self.num_kvcache_blocks, -1)
        for name, most in MOST.items():
            if getattr(self, name) > most:
                value = shown(getattr(self, name))
                raise ValueError(f"{name} must be at most {most}, got {value}; lower it")
        _check_int("seed", self.seed, 0, MAX_SEED)
        if self.num_kvcache_blocks == 0:
            raise ValueError("num_kvcache_blocks must be >= 1, or -1 to measure, got 0")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, int | float):
            raise TypeError(f"gpu_memory_utilization must be a number, got {shown(utilization)}")
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {shown(utilization)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype must be 'auto' or 'fp8', got {shown(self.kv_cache_dtype)}"
            )
        if not isinstance(self.attention_backend, str):
            raise TypeError(f"attention_backend must be a str, got {shown(self.attention_backend)}")
        if self.revision is not None and not isinstance(self.revision, str):
            raise TypeError(f"revision must be a str or None, got {shown(self.revision)}")
        for name in BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {shown(value)}")
        if not isinstance(self.async_scheduling, bool) and self.async_scheduling != "auto":
            raise TypeError(
                "async_scheduling must be True or False, or 'auto', got "
                f"{shown(self.async_scheduling)}"
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

    def _check_pool(self) -> None:
        num_blocks, need = self.num_kvcache_blocks, self.max_blocks_per_seq
        if -1 < num_blocks < need:
            size = self.kvcache_block_size
            raise ValueError(
                f"the K/V pool of num_kvcache_blocks={num_blocks} blocks x {size} tokens cannot "
                f"hold one request of max_model_len={self.max_model_len} tokens, which takes "
                f"{need} blocks; raise num_kvcache_blocks to {need} or lower max_model_len to "
                f"{num_blocks * size}"
            )


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    if value < low or (high is not None and value > high):
        bounds = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bounds}, got {shown(value)}")
