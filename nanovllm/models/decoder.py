"""The pre-norm decoder that model families share: grouped-query attention, RoPE and SwiGLU.

Residual adds are deferred: a layer returns its output and the residual stream before that output is
added, and the next norm adds. The norm also sums the ranks' parts of an output. Module names are
those of the checkpoints, so that parameters find their tensors by name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import GatedLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rope_scaling import read_rope
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.supported import check_silu, check_supported
from nanovllm.utils.context import Context
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import PackedModules


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How the attention of a family differs from that of others.

    qk_norm: each query and key head passes an RMSNorm before RoPE.
    """

    head_dim: int
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool


class DecoderAttention(nn.Module):
    def __init__(
        self,
        hf_config: PretrainedConfig,
        group: TPGroup,
        spec: AttentionSpec,
        rotary: RotaryEmbedding,
    ) -> None:
        super().__init__()
        head_dim, eps = spec.head_dim, hf_config.rms_norm_eps
        num_heads, num_kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(
            group,
            hf_config.hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=spec.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            group, num_heads * head_dim, hf_config.hidden_size, bias=spec.o_bias
        )
        self.q_norm = RMSNorm(head_dim, eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if spec.qk_norm else None
        self.rotary = rotary
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim)

    def forward(
        self, hidden: Tensor, positions: Tensor, context: Context, wanted: Tensor | None
    ) -> Tensor:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm, self.k_norm
        qkv = self.qkv_proj(hidden)
        attended = self.attn(qkv, positions, context, self.rotary, norms)
        out: Tensor = self.o_proj(attended if wanted is None else attended[wanted])
        return out


class GatedMLP(nn.Module):
    """down_proj(SiLU(gate_proj(x)) * up_proj(x)), known as SwiGLU."""

    def __init__(
        self, group: TPGroup, hidden_size: int, intermediate_size: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        group.share(intermediate_size, "intermediate_size")  # raises if it does not divide
        self.gate_up_proj = GatedLinear(group, hidden_size, intermediate_size, bias=bias)
        self.down_proj = RowParallelLinear(group, intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(hidden))  # SiLU(gate) * up included
        return out


class DecoderLayer(nn.Module):
    """mlp: maps this rank's hidden states [t, hidden_size] to its summand of the output."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        group: TPGroup,
        attention: DecoderAttention,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        size, eps = hf_config.hidden_size, hf_config.rms_norm_eps
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(size, eps, group)
        self.post_attention_layernorm = RMSNorm(size, eps, group)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        context: Context,
        wanted: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """hidden and residual [t, hidden_size] -> both of the `wanted` tokens, None for all."""
        hidden, residual = self.input_layernorm.add_forward(hidden, residual)
        hidden = self.self_attn(hidden, positions, context, wanted)
        residual = residual if wanted is None else residual[wanted]
        hidden, residual = self.post_attention_layernorm.add_forward(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    def __init__(
        self, hf_config: PretrainedConfig, group: TPGroup, layers: Iterable[DecoderLayer]
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            group, hf_config.vocab_size, hf_config.hidden_size
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps, group)

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: Context, wanted: Tensor | None
    ) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            # The last layer's K/V is all that is needed of the other tokens.
            of_layer = wanted if index == last else None
            hidden, residual = layer(hidden, residual, positions, context, of_layer)
        hidden, _ = self.norm.add_forward(hidden, residual)
        return hidden


class DecoderForCausalLM(nn.Module):
    """A `CausalLM` made of the blocks above.

    Each family defines its `attention_spec`. A family whose layers have other MLPs than `GatedMLP`
    overrides `make_mlp`.
    """

    packed_modules_mapping: ClassVar[PackedModules] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(
        self,
        hf_config: PretrainedConfig,
        group: TPGroup,
        *,
        tie_word_embeddings: bool,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        if max_model_len is None:
            max_model_len = hf_config.max_position_embeddings
        check_supported(hf_config, max_model_len)
        spec, rope = self.attention_spec(hf_config), read_rope(hf_config)
        rotary = RotaryEmbedding(spec.head_dim, max_model_len, rope.theta, rope.scaling)
        layers = (
            DecoderLayer(
                hf_config,
                group,
                DecoderAttention(hf_config, group, spec, rotary),
                self.make_mlp(hf_config, group, index),
            )
            for index in range(hf_config.num_hidden_layers)
        )
        self.model = Decoder(hf_config, group, layers)
        self.lm_head = ParallelLMHead(
            group,
            hf_config.vocab_size,
            hf_config.hidden_size,
            embedding=self.model.embed_tokens if tie_word_embeddings else None,
        )

    @staticmethod
    def attention_spec(hf_config: PretrainedConfig) -> AttentionSpec:
        """Reads the attention of this family from the config."""
        raise NotImplementedError

    @staticmethod
    def make_mlp(hf_config: PretrainedConfig, group: TPGroup, layer_index: int) -> nn.Module:
        """Makes the MLP of one layer, which a norm follows that sums over the ranks."""
        check_silu(hf_config)
        bias = bool(getattr(hf_config, "mlp_bias", False))
        return GatedMLP(group, hf_config.hidden_size, hf_config.intermediate_size, bias=bias)

    @property
    def first_id(self) -> int:
        return self.lm_head.first_id

    @property
    def attention_layers(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: Context, wanted: Tensor | None = None
    ) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions, context, wanted)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits
