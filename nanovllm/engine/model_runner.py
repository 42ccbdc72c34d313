"""One device's side of the engine: model, K/V cache and row state, and the steps on them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.kv_cache import resolve_num_blocks
from nanovllm.engine.row_state import RowState
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backends import select_backend
from nanovllm.layers.sampler import Sampler
from nanovllm.models import model_class
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import Checkpoint, load_model


class CompletedStep:
    """`StepHandle` of a step whose ids are already on the host."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def token_ids(self) -> list[int]:
        return self._token_ids


class ModelRunner:
    """Builds and loads the model, sizes the K/V cache, and computes scheduled batches in order."""

    def __init__(self, config: Config, group: TPGroup) -> None:
        self.config = config
        self.device = config.torch_device
        self.sampler = Sampler()
        self.backend = select_backend(
            config.attention_backend, block_size=config.kvcache_block_size
        )
        checkpoint = Checkpoint(config.model)
        cls = model_class(config.hf_config)
        is_tied = checkpoint.is_tied(config.hf_config.tie_word_embeddings)
        with _torch_defaults(config.torch_dtype, self.device):
            self.model = cls(config.hf_config, group, tie_word_embeddings=is_tied)
        load_model(self.model, checkpoint, cls.packed_modules_mapping)
        self.num_blocks = self._allocate_kv_cache()
        self.rows = RowState(
            config.max_num_seqs,
            -(-config.max_model_len // config.kvcache_block_size),
            config.kvcache_block_size,
            self.device,
        )

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> CompletedStep:
        """Computes one step; on the CPU it is complete when this returns."""
        inputs = self.rows.prepare(batch)
        hidden = self.model(inputs.input_ids, inputs.positions, inputs.context)
        if not inputs.sampled_rows.numel():
            return CompletedStep([])
        logits = self.model.compute_logits(hidden[inputs.logits_indices])
        rows, state = inputs.sampled_rows, self.rows
        sampled = self.sampler(
            logits, state.temperatures[rows], state.seeds[rows], state.context_lens[rows]
        )
        self.rows.finish(inputs, sampled)
        return CompletedStep(sampled.tolist())

    def _allocate_kv_cache(self) -> int:
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        block_shape = (
            self.config.kvcache_block_size,
            layers[0].num_kv_heads,
            layers[0].head_dim,
        )
        block_bytes = (
            2 * len(layers) * torch.Size(block_shape).numel() * self.config.torch_dtype.itemsize
        )
        num_blocks = resolve_num_blocks(self.config, block_bytes)
        # Zeros, not empty: what attention masks out must still be finite.
        pool = torch.zeros(
            2,
            len(layers),
            num_blocks,
            *block_shape,
            dtype=self.config.torch_dtype,
            device=self.device,
        )
        for layer, k_cache, v_cache in zip(layers, pool[0], pool[1], strict=True):
            layer.bind(self.backend, k_cache, v_cache)
        return num_blocks


@contextmanager
def _torch_defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Default dtype and device for the block, whatever ends it."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
