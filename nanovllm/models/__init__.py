"""Model classes by the name that a checkpoint's `architectures` gives."""

from transformers import PretrainedConfig

from nanovllm.models.qwen3 import Qwen2ForCausalLM, Qwen3ForCausalLM

MODELS: dict[str, type[Qwen3ForCausalLM]] = {
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def model_class(hf_config: PretrainedConfig) -> type[Qwen3ForCausalLM]:
    names = list(hf_config.architectures or [])
    for name in names:
        if name in MODELS:
            return MODELS[name]
    raise ValueError(f"architectures {names} are not supported; supported: {', '.join(MODELS)}")
