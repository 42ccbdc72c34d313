"""The registry of model classes, by the names that checkpoints give in `architectures`."""

from transformers import PretrainedConfig

from nanovllm.models.causal_lm import CausalLM
from nanovllm.models.qwen3 import Qwen2ForCausalLM, Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def model_class(hf_config: PretrainedConfig) -> type[CausalLM]:
    """Returns the class for the config's first known architecture, else raises `ValueError`."""
    names = list(hf_config.architectures or [])
    for name in names:
        if name in MODELS:
            return MODELS[name]
    raise ValueError(f"architectures {names} are not supported; supported: {', '.join(MODELS)}")
