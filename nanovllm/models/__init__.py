"""The registry of model classes, by the names that checkpoints give in `architectures`."""

import torch
from transformers import PretrainedConfig

from nanovllm.models.causal_lm import CausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.mistral import MistralForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.shown import cut

MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def model_class(hf_config: PretrainedConfig) -> type[CausalLM]:
    """Returns the class for the config's first known architecture, else raises `ValueError`."""
    return MODELS[known_architecture(hf_config.architectures)]


def known_architecture(names: object) -> str:
    """Returns the first name of a config's `architectures` that has a class.

    Raises `ValueError` if none has.
    """
    for name in names if isinstance(names, list | tuple) else ():
        if isinstance(name, str) and name in MODELS:
            return name
    raise ValueError(
        f"architectures {cut(names)} are not supported; supported: {', '.join(MODELS)}"
    )


def model_outline(
    hf_config: PretrainedConfig, group: TPGroup, *, max_model_len: int, tie_word_embeddings: bool
) -> CausalLM:
    """Makes a rank's model of shapes alone, on torch's meta device, which takes no memory.

    Raises `ValueError` if the model would be refused.
    """
    cls = model_class(hf_config)
    with torch.device("meta"):
        return cls(
            hf_config,
            group,
            tie_word_embeddings=tie_word_embeddings,
            max_model_len=max_model_len,
        )
