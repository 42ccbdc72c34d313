"""Makes tiny random checkpoints and a tokenizer, so that the tests need no network."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CORPUS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife.",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 512
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
}


def make_checkpoint(
    path: Path,
    architecture: str = "Qwen3ForCausalLM",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Writes a random model with some 10k parameters. Its weights are large enough (std 0.2,
    embeddings 0.5) that greedy decoding does not collapse to one token."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if architecture.startswith("Qwen3"):
        shape["head_dim"] = 16
    if architecture == "Qwen3MoeForCausalLM":
        shape |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = CONFIGS[architecture](**shape | overrides)
    config.architectures = [architecture]
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            noise = torch.randn(param.shape, generator=generator)
            if "norm" in name:
                param.copy_(1 + 0.1 * noise)
            else:
                param.copy_(noise * (0.5 if "embed" in name else 0.2))
    model.to(dtype).save_pretrained(path)
    if with_tokenizer:
        make_tokenizer(path)
    return path


def rope_fields(rope_theta: float, **scaling: Any) -> dict[str, Any]:
    """Returns the fields of a config for RoPE, as the installed transformers spells them."""
    if transformers.__version__.startswith("4."):
        return {"rope_theta": rope_theta, "rope_scaling": scaling}
    return {"rope_parameters": {"rope_theta": rope_theta} | scaling}


def make_tokenizer(path: Path) -> None:
    """Writes a byte-level BPE tokenizer of at most `VOCAB_SIZE` ids whose <|im_end|> (id 1) ends a
    text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
