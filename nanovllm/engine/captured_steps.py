"""The CUDA graphs of a runner: which steps have one, what they take, and their replay."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.autotune import TunedMatmuls, applied
from nanovllm.engine.batch import DecodePart, PrefillPart
from nanovllm.engine.cuda_graph import Layout, StepGraphs, bucket_sizes, graph_bytes
from nanovllm.engine.decode_layout import PrefixDecodeLayout, RowsLayout, prefix_graph_sizes
from nanovllm.engine.prefill_layout import (
    MAX_GRAPH_CONTEXT,
    PrefillArrays,
    PrefillLayout,
    graph_layouts,
)
from nanovllm.layers.attention import Attention
from nanovllm.utils.context import SharedPrefixes

Sampled = tuple[torch.Tensor, torch.Tensor]


class Steps(Protocol):
    """The steps of a `ModelRunner` that are captured.

    They return the sampled ids, and the logits that they were drawn from.
    """

    def decode_step(
        self, rows: torch.Tensor, max_context_len: int, prefixes: SharedPrefixes | None = None
    ) -> Sampled: ...

    def prefill_step(
        self,
        arrays: PrefillArrays,
        num_sampled: int,
        *,
        max_seqlen_q: int,
        max_context_len: int,
        is_paged: bool,
    ) -> Sampled: ...


class CapturedSteps:
    """Graphs of decode steps, of those whose sequences share prefixes, and of small prefills.

    attention: one of the model's layers, of which all have the same shape.
    has_prefixes: whether the attention backend reads shared prefixes once.
    has_prefills: whether prefills may be captured.
    tuned_matmuls: what the layers multiply with in graphs.
    """

    def __init__(
        self,
        config: Config,
        attention: Attention,
        *,
        has_prefixes: bool,
        has_prefills: bool,
        tuned_matmuls: TunedMatmuls,
    ) -> None:
        self._device = config.torch_device
        self._max_model_len = config.max_model_len
        self._prefill_context = min(config.max_model_len, MAX_GRAPH_CONTEXT)
        self._tuned_matmuls = tuned_matmuls
        sizes = bucket_sizes(config.max_num_seqs)
        shape = attention.num_heads, attention.num_kv_heads, config.kvcache_block_size
        prefixes = [PrefixDecodeLayout(n, *shape) for n in prefix_graph_sizes(sizes)]
        prefills = graph_layouts(config.max_num_batched_tokens, config.max_num_seqs)
        self._rows_layouts = [RowsLayout(size) for size in sizes]
        self._prefix_layouts = prefixes if has_prefixes else []
        self._prefill_layouts = prefills if has_prefills else []
        self._decodes: StepGraphs[RowsLayout] | None = None
        self._prefixes: StepGraphs[PrefixDecodeLayout] | None = None
        self._prefills: StepGraphs[PrefillLayout] | None = None

    @property
    def reads_prefixes_once(self) -> bool:
        return bool(self._prefix_layouts)

    @property
    def num_graphs(self) -> int:
        return len(self._rows_layouts) + len(self._prefix_layouts) + len(self._prefill_layouts)

    def num_bytes(self, steps: Steps) -> int:
        """Measures the GPU memory that `capture` will take."""
        device = self._device
        return (
            graph_bytes(partial(self._capture_decodes, steps), self._rows_layouts, device)
            + graph_bytes(partial(self._capture_prefixes, steps), self._prefix_layouts, device)
            + graph_bytes(partial(self._capture_prefills, steps), self._prefill_layouts, device)
        )

    def capture(self, steps: Steps) -> None:
        """Captures all graphs on the current stream; they hold the addresses of the K/V pool."""
        self._decodes = self._capture_decodes(steps, self._rows_layouts)
        if self._prefix_layouts:
            self._prefixes = self._capture_prefixes(steps, self._prefix_layouts)
        if self._prefill_layouts:
            self._prefills = self._capture_prefills(steps, self._prefill_layouts)

    def decode(
        self, part: DecodePart, send: Callable[[np.ndarray], torch.Tensor]
    ) -> Sampled | None:
        """Replays the graph of a decode step, None if it has none; returns what the step does.

        send: copies the inputs to the device.
        """
        graphs: StepGraphs[Any] | None = self._prefixes if part.prefix_groups else self._decodes
        return _replay(graphs, part, send)

    def prefill(
        self, part: PrefillPart, send: Callable[[np.ndarray], torch.Tensor]
    ) -> Sampled | None:
        """As `decode`, for a prefill."""
        is_long = part.max_context_len > self._prefill_context
        return None if is_long else _replay(self._prefills, part, send)

    def _capture_decodes(
        self, steps: Steps, layouts: Sequence[RowsLayout]
    ) -> StepGraphs[RowsLayout]:
        def step(layout: RowsLayout, rows: torch.Tensor) -> Sampled:
            return steps.decode_step(rows, self._max_model_len)

        return self._captured(step, layouts)

    def _capture_prefixes(
        self, steps: Steps, layouts: Sequence[PrefixDecodeLayout]
    ) -> StepGraphs[PrefixDecodeLayout]:
        def step(layout: PrefixDecodeLayout, packed: torch.Tensor) -> Sampled:
            rows, prefixes = layout.unpack(packed)
            return steps.decode_step(rows, self._max_model_len, prefixes)

        return self._captured(step, layouts)

    def _capture_prefills(
        self, steps: Steps, layouts: Sequence[PrefillLayout]
    ) -> StepGraphs[PrefillLayout]:
        def step(layout: PrefillLayout, packed: torch.Tensor) -> Sampled:
            return steps.prefill_step(
                layout.unpack(packed),
                layout.num_seqs,
                max_seqlen_q=layout.num_tokens,
                max_context_len=self._prefill_context,
                is_paged=True,
            )

        return self._captured(step, layouts)

    def _captured(
        self,
        step: Callable[[Layout, torch.Tensor], Sampled],
        layouts: Sequence[Layout],
    ) -> StepGraphs[Layout]:
        with applied(self._tuned_matmuls):
            return StepGraphs(step, layouts, self._device)


def _replay(
    graphs: StepGraphs[Layout] | None,
    part: DecodePart | PrefillPart,
    send: Callable[[np.ndarray], torch.Tensor],
) -> Sampled | None:
    layout = graphs.layout_for(part) if graphs is not None else None
    if graphs is None or layout is None:
        return None
    token_ids, logits = graphs.replay(layout, send(layout.pack(part)))
    return token_ids, logits
