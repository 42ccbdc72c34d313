"""Refuses a checkpoint that an engine would compute wrongly or could not load.

It needs the config and the headers of the weights alone: no memory is taken, no weight read and no
process started before.
"""

import torch

from nanovllm.config import Config
from nanovllm.engine.kv_cache import GIB, block_bytes
from nanovllm.layers.attention_backends import AttentionLayout, select_backend
from nanovllm.models import model_outline
from nanovllm.models.causal_lm import CausalLM
from nanovllm.utils.checkpoint import LM_HEAD, Checkpoint
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.host_memory import host_memory
from nanovllm.utils.loader import check_tensors


def check_checkpoint(config: Config) -> None:
    """Raises `ValueError` if the engine that `config` describes would be refused."""
    checkpoint = Checkpoint(config.model)
    # Whether a head equals the embedding is in the weights, but with either answer it must fit.
    has_head = LM_HEAD in checkpoint.names
    model = model_outline(
        config.hf_config,
        TPGroup(0, config.tensor_parallel_size),
        max_model_len=config.max_model_len,
        tie_word_embeddings=not has_head and config.tie_word_embeddings is not False,
    )
    layer = model.attention_layers[0]
    select_backend(
        config.attention_backend,
        AttentionLayout(
            config.torch_device,
            config.torch_dtype,
            layer.head_dim,
            config.kvcache_block_size,
            config.kv_cache_dtype,
        ),
    )
    check_tensors(model, checkpoint, model.packed_modules_mapping)
    _check_memory(config, model)


def _check_memory(config: Config, model: CausalLM) -> None:
    """Raises `ValueError` if weights, the least K/V pool and its tables exceed all the memory.

    model: rank 0's share of the weights.
    """
    blocks_per_seq = config.max_blocks_per_seq
    num_blocks = blocks_per_seq if config.num_kvcache_blocks == -1 else config.num_kvcache_blocks
    num_weights = sum(param.numel() for _, param in model.named_parameters())
    weights = num_weights * config.torch_dtype.itemsize
    tables = config.max_num_seqs * blocks_per_seq * torch.int32.itemsize
    block = block_bytes(config, model.attention_layers)
    if config.torch_device.type == "cuda":
        total = torch.cuda.get_device_properties(config.torch_device).total_memory
    else:  # all ranks share it
        total = host_memory().total // config.tensor_parallel_size
    affordable = (total - weights - tables) // block
    if num_blocks > affordable:
        raise ValueError(
            f"{config.model} with num_kvcache_blocks={config.num_kvcache_blocks}, "
            f"kvcache_block_size={config.kvcache_block_size}, "
            f"max_model_len={config.max_model_len} and max_num_seqs={config.max_num_seqs} takes "
            f"{weights / GIB:.2f} GiB for the weights, {tables / GIB:.2f} for tables and "
            f"{num_blocks * block / GIB:.2f} for {num_blocks} K/V blocks, but {total / GIB:.2f} "
            f"are all the memory for a rank: at most {max(affordable, 0)} blocks; lower these, or "
            "use a smaller model, or more ranks on GPUs"
        )
