"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with mixtures of experts in place of some or all MLPs."""

from torch import nn
from transformers import PretrainedConfig

from nanovllm.layers.moe import MixtureOfExperts
from nanovllm.models.config_fields import check_size
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.supported import check_silu
from nanovllm.utils.distributed import TPGroup


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list has experts."""

    @staticmethod
    def make_mlp(hf_config: PretrainedConfig, group: TPGroup, layer_index: int) -> nn.Module:
        check_size("decoder_sparse_step", getattr(hf_config, "decoder_sparse_step", None))
        if not has_experts(hf_config, layer_index):
            return Qwen3ForCausalLM.make_mlp(hf_config, group, layer_index)
        check_silu(hf_config)
        # transformers 5 writes num_local_experts, and reads it as num_experts; 4.x does not.
        name = "num_local_experts" if hasattr(hf_config, "num_local_experts") else "num_experts"
        for size in (name, "num_experts_per_tok", "moe_intermediate_size"):
            check_size(size, getattr(hf_config, size, None))
        return MixtureOfExperts(
            group,
            num_experts=getattr(hf_config, name),
            top_k=hf_config.num_experts_per_tok,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.moe_intermediate_size,
            normalise=hf_config.norm_topk_prob,
        )


def has_experts(hf_config: PretrainedConfig, layer_index: int) -> bool:
    """Returns whether a layer has experts rather than one MLP."""
    is_sparse = (layer_index + 1) % hf_config.decoder_sparse_step == 0
    return is_sparse and layer_index not in (hf_config.mlp_only_layers or [])
