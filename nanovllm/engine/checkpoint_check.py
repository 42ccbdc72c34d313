"""Refuses a checkpoint that an engine would compute wrongly or could not load.

It needs the config and the headers of the weights alone: no memory is taken, no weight read and no
process started before.
"""

from nanovllm.config import Config
from nanovllm.layers.attention_backends import AttentionLayout, select_backend
from nanovllm.models import model_outline
from nanovllm.utils.checkpoint import LM_HEAD, Checkpoint
from nanovllm.utils.distributed import TPGroup
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
