"""One device's side of the engine: model, K/V cache and row state, and the steps on them."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import ScheduledBatch
from nanovllm.engine.compilation import attention_launches, compile_together
from nanovllm.engine.cuda_graph import DecodeGraphs, bucket_sizes
from nanovllm.engine.kv_cache import cpu_pool_bytes, cuda_pool_bytes, resolve_num_blocks, zeros
from nanovllm.engine.row_state import RowState, StepInputs
from nanovllm.engine.staging import DeviceToHost, FetchedIds
from nanovllm.engine.tuning import tune_linears
from nanovllm.engine.warm_up import warm_up_batches
from nanovllm.kernels import compile_cpu_kernels
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backends import AttentionLayout, select_backend
from nanovllm.layers.sampler import Sampler
from nanovllm.models import model_class
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import Checkpoint, load_model


class ModelRunner:
    """Builds and loads the model, sizes the K/V cache, and computes scheduled batches in order.

    Everything on a GPU happens on one stream of the runner's own, in launch order.
    """

    def __init__(self, config: Config, group: TPGroup) -> None:
        self.config = config
        self.group = group
        self.device = config.torch_device
        self._stream: torch.cuda.Stream | None = None
        self._graphs: DecodeGraphs | None = None
        free_at_start = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free_at_start = torch.cuda.mem_get_info(self.device)[0] + group.gpu_bytes
            self._stream = torch.cuda.Stream(self.device)
        with self._on_stream(), torch.inference_mode():
            self._load()
            self.num_blocks = self._boot(free_at_start)

    def launch(self, batch: ScheduledBatch) -> FetchedIds:
        """Starts one step; on the CPU it is complete when this returns."""
        with self._on_stream(), torch.inference_mode():
            ids = self._prefill(batch) if batch.is_prefill else self._decode(batch)
            return self._to_host.fetch(ids)

    def drop_graphs(self) -> None:
        """Frees the CUDA graphs, without waiting; steps then run without."""
        self._graphs = None

    def exit(self) -> None:
        """Frees everything. Idempotent; nothing else works afterwards."""
        is_cuda = vars(self).get("_stream") is not None
        try:
            if is_cuda:
                torch.cuda.synchronize(self.device)
        finally:  # after an error on the GPU it raises that again
            vars(self).clear()
        if is_cuda:
            torch.cuda.empty_cache()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # torch may have gone; the process's end frees everything
            self.exit()

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _load(self) -> None:
        config = self.config
        checkpoint = Checkpoint(config.model)
        cls = model_class(config.hf_config)
        is_tied = checkpoint.is_tied(config.hf_config.tie_word_embeddings)
        with _torch_defaults(config.torch_dtype, self.device):
            self.model = cls(config.hf_config, self.group, tie_word_embeddings=is_tied)
        self._attention = [m for m in self.model.modules() if isinstance(m, Attention)]
        layout = AttentionLayout(
            self.device,
            config.torch_dtype,
            self._attention[0].head_dim,
            config.kvcache_block_size,
        )
        self.backend = select_backend(config.attention_backend, layout)  # refuses before loading
        load_model(self.model, checkpoint, cls.packed_modules_mapping)
        self.sampler = Sampler(self.group, self.model.lm_head.first_id)
        max_num_blocks = -(-config.max_model_len // config.kvcache_block_size)
        self.rows = RowState(
            config.max_num_seqs, max_num_blocks, config.kvcache_block_size, self.device, self.group
        )
        self._to_host = DeviceToHost(self.device, config.max_num_seqs, self.group)

    def _prefill(self, batch: ScheduledBatch) -> torch.Tensor:
        inputs, last_tokens, rows = self.rows.prefill_inputs(batch)
        hidden = self._forward(inputs, last_tokens)
        return self._sample(hidden, rows) if len(rows) else rows

    def _decode(self, batch: ScheduledBatch) -> torch.Tensor:
        self.rows.grow(batch.growth)
        n = len(batch.rows)
        size = self._graphs.size_for(n) if self._graphs else None
        if self._graphs is None or size is None:
            return self._decode_step(self.rows.send_rows(batch.rows), batch.max_context_len)
        return self._graphs.replay(self.rows.send_rows(batch.rows + [-1] * (size - n)))[:n]

    def _decode_step(self, rows: torch.Tensor, max_context_len: int) -> torch.Tensor:
        return self._sample(self._forward(self.rows.decode_inputs(rows, max_context_len)), rows)

    def _forward(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        ids, positions, context = inputs.input_ids, inputs.positions, inputs.context
        hidden: torch.Tensor = self.model(ids, positions, context, wanted)
        return hidden

    def _sample(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> the next token of each row, int64 [n], kept as its last."""
        state, logits = self.rows, self.model.compute_logits(hidden)
        sampled: torch.Tensor = self.sampler(
            logits, rows, state.temperatures, state.seeds, state.context_lens, state.last_tokens
        )
        return sampled

    def _boot(self, free_at_start: int) -> int:
        """Sizes and binds the K/V pool, captures the graphs, and leaves nothing to be compiled or
        allocated later. Returns the number of blocks."""
        config = self.config
        if self.device.type != "cuda":
            pool_bytes = self.group.min(cpu_pool_bytes() // self.group.size)
            num_blocks = resolve_num_blocks(config, self._block_bytes(), pool_bytes)
            self._bind_pool(num_blocks)
            compile_cpu_kernels(config.torch_dtype)
            return num_blocks
        sizes = [] if config.enforce_eager else bucket_sizes(config.max_num_seqs)
        if self.backend.name == "torch":
            sizes = []  # it reads lengths on the host
        self._bind_pool(1)
        compile_together(attention_launches(self._attention[0], self._decode_sizes()), self.device)
        if sizes:
            tune_linears(self.model, sizes[-1], self.group)
        working_bytes = self._activation_bytes() + self._graph_bytes(sizes)
        pool_bytes = self.group.min(cuda_pool_bytes(config, free_at_start, working_bytes))
        num_blocks = resolve_num_blocks(config, self._block_bytes(), pool_bytes)
        self._bind_pool(num_blocks)
        if sizes:
            self._graphs = self._capture(sizes)
        self._warm_up()
        return num_blocks

    def _decode_sizes(self) -> list[int]:
        num_kv_heads = self._attention[0].num_kv_heads
        return self.backend.decode_sizes(self.config.max_num_seqs, num_kv_heads)

    def _block_bytes(self) -> int:
        layer = self._attention[0]
        token = layer.num_kv_heads * layer.head_dim * self.config.torch_dtype.itemsize
        return 2 * len(self._attention) * self.config.kvcache_block_size * token

    def _bind_pool(self, num_blocks: int) -> None:
        layer = self._attention[0]
        for attention in self._attention:  # frees the previous pool first
            attention.bind(self.backend, torch.empty(0), torch.empty(0))
        shape = (
            2,
            len(self._attention),
            num_blocks,
            self.config.kvcache_block_size,
            layer.num_kv_heads,
            layer.head_dim,
        )
        pool = zeros(shape, self.config.torch_dtype, self.device)
        for attention, k_cache, v_cache in zip(self._attention, pool[0], pool[1], strict=True):
            attention.bind(self.backend, k_cache, v_cache)

    def _capture(self, sizes: list[int]) -> DecodeGraphs:
        max_model_len = self.config.max_model_len
        return DecodeGraphs(lambda rows: self._decode_step(rows, max_model_len), sizes, self.device)

    def _activation_bytes(self) -> int:
        """What the largest steps allocate beyond what is allocated now."""
        self._warm_up()  # first: lazily created workspaces are no part of a step
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        self._warm_up()
        return torch.cuda.max_memory_reserved(self.device) - before

    def _graph_bytes(self, sizes: list[int]) -> int:
        """What graphs of all sizes will take: the memory of the largest, which all share, and each
        one's own nodes, measured on the two largest (it is outside torch's statistics)."""
        if not sizes:
            return 0
        frees = [self._free_bytes()]
        for count in (1, 2):
            graphs = self._capture(sizes[-count:])
            frees.append(self._free_bytes())
            del graphs
        first, second = frees[0] - frees[1], frees[0] - frees[2]
        return first + max(second - first, 0) * (len(sizes) - 1)

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _warm_up(self) -> None:
        for batch in warm_up_batches(self.config, self._decode_sizes()):
            # What the steps before have left must not grow past the block tables.
            self.rows.context_lens.clamp_(max=self.config.max_model_len - 1)
            self.launch(batch).token_ids()


@contextmanager
def _torch_defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Default dtype and device for the block, whatever ends it."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
