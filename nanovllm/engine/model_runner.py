"""One device's side of the engine: it loads a model, and computes scheduled batches on it."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.autotune import TunedMatmuls, autotune_matmuls, candidate_calls
from nanovllm.engine.batch import DecodePart, PrefillPart, ScheduledBatch
from nanovllm.engine.captured_steps import CapturedSteps, Sampled
from nanovllm.engine.compilation import (
    KernelCall,
    compile_together,
    decode_attention_calls,
    expert_calls,
    prefill_attention_calls,
)
from nanovllm.engine.cuda_graph import bucket_sizes
from nanovllm.engine.kv_cache import KVCache
from nanovllm.engine.logprobs import StepReports
from nanovllm.engine.prefill_layout import PrefillArrays, PrefillLayout
from nanovllm.engine.row_state import RowState, StepInputs
from nanovllm.engine.staging import DeviceToHost, FetchedIds
from nanovllm.engine.warm_up import activation_bytes, warm_up_batches
from nanovllm.kernels import compile_cpu_kernels
from nanovllm.layers.attention_backends import AttentionLayout, select_backend
from nanovllm.layers.sampler import Sampler
from nanovllm.models import model_class
from nanovllm.models.causal_lm import CausalLM
from nanovllm.utils.ambient import EmptyTensors, defaults_of_torch
from nanovllm.utils.checkpoint import Checkpoint, WeightSource
from nanovllm.utils.context import SharedPrefixes
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.gpu_streams import give_back_stream, take_stream
from nanovllm.utils.loader import check_weights, load_model, update_weights
from nanovllm.utils.thread_pacing import ThreadPacing


class ModelRunner:
    """The model, the K/V cache and the row state of one rank, and the steps on them.

    Batches are computed in the order of their launch. On a GPU, everything happens on one stream of
    the runner's own. With several ranks, each public method is called on all of them alike.
    """

    def __init__(self, config: Config, group: TPGroup) -> None:
        # What __del__ needs, even when modules have been taken apart.
        self._home = os.getpid(), os.getpid, _keep_for_ever()
        self.config = config
        self.group = group
        self.device = config.torch_device
        self._stream: torch.cuda.Stream | None = None
        self._threads = threading.local()  # which of them have the device's context
        self._captured: CapturedSteps | None = None
        self._tuned_matmuls: TunedMatmuls = []
        self._pacing = ThreadPacing() if self.device.type == "cpu" else None
        free_at_start = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free_at_start = torch.cuda.mem_get_info(self.device)[0] + group.gpu_bytes
            self._stream = take_stream(self.device)
        with self._no_ambient(), self._on_stream(), torch.inference_mode():
            self._load()
            if self.device.type == "cuda":
                self._boot_gpu(free_at_start)
            else:
                self.kv_cache.allocate_on_cpu()
                has_attention = self.backend.name == "numba"
                compile_cpu_kernels(config.torch_dtype, has_attention)

    @property
    def num_blocks(self) -> int:
        """The size of the K/V pool, the same on all ranks."""
        return self.kv_cache.num_blocks

    @property
    def description(self) -> str:
        """What runs on what, in one line."""
        config = self.config
        graphs = self._captured.num_graphs if self._captured else "no"
        return (
            f"{config.model} on {config.torch_device}, {self.group.size} rank(s), "
            f"{str(config.torch_dtype).removeprefix('torch.')}, attention backend "
            f"{self.backend.name}, K/V pool of {self.num_blocks} blocks of "
            f"{config.kvcache_block_size} tokens, {graphs} CUDA graphs"
        )

    @property
    def reads_prefixes_once(self) -> bool:
        """Whether decode steps make use of their batch's prefix groups."""
        return self._captured is not None and self._captured.reads_prefixes_once

    def launch(self, batch: ScheduledBatch) -> FetchedIds:
        """Starts one step; on the CPU it is complete when this returns."""
        with (
            self._no_ambient(),
            self._on_stream(),
            self._on_threads(),
            torch.inference_mode(),
        ):
            reports = StepReports()
            return self._to_host.fetch(self._sampled_ids(batch, reports), reports)

    def check_weights(self, source: WeightSource) -> None:
        """Raises the errors of `update_weights`, on this rank alone, and changes nothing."""
        with self._no_ambient(), torch.inference_mode():
            check_weights(self.model, source, self.model.packed_modules_mapping)

    def update_weights(self, source: WeightSource) -> None:
        """Replaces all weights; on a GPU in place, so that CUDA graphs stay valid.

        Raises `ValueError` and changes nothing if they do not match the model. No rank returns
        before all have read them.
        """
        if self._stream:  # the caller's may still compute the weights
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._no_ambient(), self._on_stream(), torch.inference_mode():
            mapping = self.model.packed_modules_mapping
            update_weights(self.model, source, mapping, self.config.torch_dtype)
            if self._stream:
                self._stream.synchronize()
        self.group.min(0)

    def drop_graphs(self) -> None:
        """Frees the CUDA graphs without waiting for the GPU; later steps run without them."""
        self._captured = None

    def exit(self) -> None:
        """Frees everything; nothing else works afterwards. A second call does nothing."""
        stream: torch.cuda.Stream | None = vars(self).get("_stream")
        try:
            if stream is not None:
                torch.cuda.synchronize(self.device)
        finally:  # after an error on the GPU it raises that again
            vars(self).clear()
        if stream is not None:
            give_back_stream(stream)
            torch.cuda.empty_cache()

    def __del__(self) -> None:
        if "_home" not in vars(self):  # all has been freed
            return
        process_id, getpid, keep = self._home
        if process_id != getpid():
            # A forked copy has none of the threads that taking it apart would wait for, and no
            # right to the GPU: it is never freed.
            keep(vars(self))
        elif not sys.is_finalizing():  # torch may have gone; the process's end frees everything
            self.exit()

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if not hasattr(self._threads, "has_context"):
            # Tensor descriptors need the device's context to be the thread's current one, which
            # any call of CUDA's runtime makes it.
            torch.cuda.synchronize(self.device)
            self._threads.has_context = True
        return torch.cuda.stream(self._stream)

    def _no_ambient(self) -> AbstractContextManager[object]:
        """Computes as in a new process, whatever the caller has set in torch."""
        return defaults_of_torch(self.device.type)

    def _on_threads(self) -> AbstractContextManager[object]:
        return self._pacing.step() if self._pacing else nullcontext()

    def _load(self) -> None:
        config = self.config
        checkpoint = Checkpoint(config.model)
        cls = model_class(config.hf_config)
        is_tied = checkpoint.is_tied(config.tie_word_embeddings)
        with self.device, EmptyTensors(config.torch_dtype):
            self.model: CausalLM = cls(
                config.hf_config,
                self.group,
                tie_word_embeddings=is_tied,
                max_model_len=config.max_model_len,
            )
        layers = self.model.attention_layers
        layout = AttentionLayout(
            self.device,
            config.torch_dtype,
            layers[0].head_dim,
            config.kvcache_block_size,
            config.kv_cache_dtype,
        )
        self.backend = select_backend(config.attention_backend, layout)  # refuses before loading
        load_model(
            self.model,
            checkpoint,
            cls.packed_modules_mapping,
            shows_progress=self.group.rank == 0,
        )
        self.kv_cache = KVCache(config, layers, self.backend, self.group)
        self.sampler = Sampler(self.group, self.model.first_id)
        self.rows = RowState(config, self.group)
        self._to_host = DeviceToHost(self.device, config.max_num_seqs, self.group)

    def _boot_gpu(self, free_at_start: int) -> None:
        """Compiles and measures all that steps need, sizes the K/V cache, and captures the graphs.

        Nothing is compiled later, and nothing but activations allocated.
        """
        device = self.device
        self.kv_cache.allocate(1)
        compile_together(self._kernel_calls(), device)
        captured = self._steps_to_capture()
        working_bytes = activation_bytes(self._warm_up, device)
        working_bytes += captured.num_bytes(self) if captured else 0
        self.kv_cache.allocate_on_gpu(free_at_start, working_bytes)
        if captured:
            captured.capture(self)
            self._captured = captured
        self._warm_up()

    @property
    def _has_graphs(self) -> bool:
        """Whether steps become CUDA graphs, on a GPU.

        The torch backend reads lengths on the host, which a graph cannot.
        """
        return not self.config.enforce_eager and self.backend.name != "torch"

    def _kernel_calls(self) -> list[KernelCall]:
        """Returns calls of the kernels that take long to compile, the longest first."""
        config, sizes = self.config, self._decode_sizes()
        calls = self.rows.special.kernel_calls(config.torch_dtype)
        if self._has_graphs and config.autotune_matmul:
            largest = bucket_sizes(config.max_num_seqs)[-1]
            calls += candidate_calls(self.model, largest, self.group)
        attention = self.model.attention_layers[0]
        dtype = config.torch_dtype
        calls += expert_calls(self.model) + decode_attention_calls(attention, sizes, dtype)
        if sizes:  # the backend compiles
            calls += prefill_attention_calls(attention, warm_up_batches(config, []), dtype)
        return calls

    def _steps_to_capture(self) -> CapturedSteps | None:
        """Autotunes the matmuls, and returns the steps that become CUDA graphs, if any."""
        config = self.config
        if not self._has_graphs:
            return None
        if config.autotune_matmul:
            largest = bucket_sizes(config.max_num_seqs)[-1]
            self._tuned_matmuls = autotune_matmuls(self.model, largest, self.group)
        return CapturedSteps(
            config,
            self.model.attention_layers[0],
            has_prefixes=self.backend.name == "triton" and config.enable_prefix_caching,
            has_prefills=self.group.size == 1,  # sums of so many tokens may go through NCCL
            tuned_matmuls=self._tuned_matmuls,
        )

    def _sampled_ids(self, batch: ScheduledBatch, reports: StepReports) -> Iterator[torch.Tensor]:
        """Launches the parts of a step one after the other; yields the ids that each samples.

        Decode comes first: its launch is short, and the GPU is busy with it while the host prepares
        the prompts. The parts add to `reports` what they have to report.
        """
        if batch.decode is not None:
            yield self._decode(batch.decode, reports)
        if batch.prefill is not None:
            yield self._prefill(batch.prefill, reports)

    def _prefill(self, part: PrefillPart, reports: StepReports) -> torch.Tensor:
        self.rows.start(part)
        targets = self.rows.special.prompt_targets(part)
        sampled = None
        if self._captured and not targets:
            sampled = self._captured.prefill(part, self.rows.send)
        if sampled is None:
            compute_logits = self.model.compute_logits

            def report(hidden: torch.Tensor) -> None:
                reported = self.rows.special.report_prompts(targets, hidden, compute_logits)
                reports.add_prompts(reported)

            layout = PrefillLayout(part.num_tokens, len(part.rows), len(part.forks))
            sampled = self.prefill_step(
                layout.unpack(self.rows.send(layout.pack(part))),
                len(part.sampled_rows),
                max_seqlen_q=max(len(chunk.token_ids) for chunk in part.chunks),
                max_context_len=part.max_context_len,
                is_paged=any(chunk.start or chunk.is_cached for chunk in part.chunks),
                report=report if targets else None,
            )
        pairs = zip(part.seq_ids, part.chunks, strict=True)
        seq_ids = [seq_id for seq_id, chunk in pairs if chunk.is_last]
        seq_ids += [fork.seq_id for fork in part.forks]
        self.kv_cache.copy(fork.copied for fork in part.forks if fork.copied)
        return self._redrawn(sampled, part.sampled_rows, seq_ids, reports)

    def prefill_step(
        self,
        arrays: PrefillArrays,
        num_sampled: int,
        *,
        max_seqlen_q: int,
        max_context_len: int,
        is_paged: bool,
        report: Callable[[torch.Tensor], None] | None = None,
    ) -> Sampled:
        """Prefills, and samples after the first `num_sampled` of the `last_tokens`.

        report: takes the hidden states of all tokens, [t, hidden_size].
        """
        inputs = self.rows.prefill_inputs(
            arrays,
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
            is_paged=is_paged,
        )
        last_tokens = arrays.last_tokens[:num_sampled]
        if report is None:
            hidden = self._forward(inputs, last_tokens)
        else:
            all_hidden = self._forward(inputs)
            report(all_hidden)
            hidden = all_hidden[last_tokens]
        rows = arrays.sampled_rows[:num_sampled]
        return self._sample(hidden, rows) if num_sampled else (rows, hidden)  # no prompt ends

    def _decode(self, part: DecodePart, reports: StepReports) -> torch.Tensor:
        self.rows.grow(part.growth)
        sampled = self._captured.decode(part, self.rows.send) if self._captured else None
        if sampled is None:
            sampled = self.decode_step(self.rows.send(np.array(part.rows)), part.max_context_len)
        return self._redrawn(sampled, part.rows, part.seq_ids, reports)

    def decode_step(
        self, rows: torch.Tensor, max_context_len: int, prefixes: SharedPrefixes | None = None
    ) -> Sampled:
        """Computes the last token of each row, and samples the next."""
        inputs = self.rows.decode_inputs(rows, max_context_len, prefixes)
        return self._sample(self._forward(inputs), rows)

    def _redrawn(
        self, sampled: Sampled, rows: list[int], seq_ids: list[int], reports: StepReports
    ) -> torch.Tensor:
        """Draws again for those of `rows` that want more than plain sampling.

        sampled: what a step returns, for these rows and then padding -> token ids int64 [len(rows)]
        """
        token_ids, logits = (result[: len(rows)] for result in sampled)
        reports.add_sampled(self.rows.special.draw(logits, token_ids, rows, seq_ids))
        return token_ids

    def _forward(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """wanted: int64 [m], the tokens whose hidden states are returned; None for all."""
        return self.model(inputs.input_ids, inputs.positions, inputs.context, wanted)

    def _sample(self, hidden: torch.Tensor, rows: torch.Tensor) -> Sampled:
        """Samples one token for each row and stores it as the row's last token.

        hidden [n, hidden_size], rows int64 [n] -> token ids int64 [n], logits
        """
        logits = self.model.compute_logits(hidden)
        return self.sampler(logits, rows, self.rows.sampling), logits

    def _decode_sizes(self) -> list[int]:
        num_kv_heads = self.model.attention_layers[0].num_kv_heads
        kv_itemsize = self.config.kv_torch_dtype.itemsize
        return self.backend.decode_sizes(self.config.max_num_seqs, num_kv_heads, kv_itemsize)

    def _warm_up(self) -> None:
        for batch in warm_up_batches(self.config, self._decode_sizes()):
            # What the steps before have left must not grow past the block tables.
            self.rows.sampling.context_lens.clamp_(max=self.config.max_model_len - 1)
            self.launch(batch).token_ids()
        for call in self.rows.special.kernel_calls(self.config.torch_dtype):
            call()


def _keep_for_ever() -> Callable[[object], None]:
    """Returns a function that makes an object live for as long as the process."""
    increment, as_object = ctypes.pythonapi.Py_IncRef, ctypes.py_object
    return lambda kept: increment(as_object(kept))
