"""Attention on a CPU by the kernel of kernels/cpu, which walks the block tables.

Prefills of long prompts are left to torch, which multiplies matrices there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels import cpu_kernels
from nanovllm.layers.attention import LayerCache
from nanovllm.layers.attention_backends.torch_sdpa import TorchBackend
from nanovllm.utils.context import Context


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A step's tokens as the kernel takes them; see its `attend`."""

    tables: Tensor
    seqs: Tensor
    lens: Tensor


class NumbaBackend(TorchBackend):
    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._tokens: tuple[Context | None, _Tokens | None] = (None, None)  # of the latest step

    def decode(self, q: Tensor, cache: LayerCache, scale: float, context: Context) -> Tensor:
        cpu = cpu_kernels(q)
        if cpu is None:
            return super().decode(q, cache, scale, context)
        if self._tokens[0] is not context:  # every layer of a step passes the same object
            assert context.block_tables is not None
            lens = context.context_lens.long()
            tables = context.block_tables.long()
            self._tokens = context, _Tokens(tables, torch.arange(len(lens)), lens)
        tokens = self._tokens[1]
        assert tokens is not None
        out: Tensor = cpu.attend(
            q, *cache, scale, tokens.tables, tokens.seqs, tokens.lens, context.max_seqlen_k
        )
        return out
