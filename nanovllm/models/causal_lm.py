"""What the engine expects of a model. Whatever has these members can be served."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig

from nanovllm.layers.attention import Attention
from nanovllm.utils.context import Context
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import PackedModules


class CausalLM(Protocol):
    """One rank's share of a decoder-only language model, an `nn.Module`.

    Modules have the names of the checkpoint, so that parameters find their tensors by name.

    packed_modules_mapping: a module of ours -> the checkpoint's modules that it packs, in order.
    """

    packed_modules_mapping: ClassVar[PackedModules]

    def __init__(
        self,
        hf_config: PretrainedConfig,
        group: TPGroup,
        *,
        tie_word_embeddings: bool,
        max_model_len: int | None = None,
    ) -> None:
        """Raises `ValueError` for a config that the class would compute wrongly.

        tie_word_embeddings: what the checkpoint turned out to hold, whatever its config says.
        max_model_len: the most tokens of a sequence; None is the config's max_position_embeddings.
        """
        ...

    @property
    def first_id(self) -> int:
        """The token id that this rank's first logit belongs to."""
        ...

    @property
    def attention_layers(self) -> Sequence[Attention]:
        """The attention modules, in the order of the layers; all have one shape."""
        ...

    def __call__(
        self, input_ids: Tensor, positions: Tensor, context: Context, wanted: Tensor | None = None
    ) -> Tensor:
        """input_ids and positions int64 [t] -> hidden states after the final norm [t, hidden_size].

        wanted: int64 [m], the tokens whose hidden states are returned, [m, hidden_size]; None is
        all of them.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> this rank's logits [n, share], from `first_id` on."""
        ...

    def modules(self) -> Iterator[nn.Module]: ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...
