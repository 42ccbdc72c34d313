"""Steps that the runner makes before any request, to compile, allocate and measure."""

from collections.abc import Callable, Iterator, Sequence

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import DecodePart, PrefillChunk, PrefillPart, RowInit, ScheduledBatch
from nanovllm.sampling_params import SamplingParams


def warm_up_batches(config: Config, decode_sizes: Sequence[int]) -> Iterator[ScheduledBatch]:
    """Yields steps that between them need all kernels and the most memory; all use block 0 only.

    decode_sizes: the batch sizes that decode attention has different kernels for.
    """
    longest, budget = config.max_model_len - 1, config.max_num_batched_tokens
    init = RowInit(SamplingParams(), seed=0, block_table=[0] * config.max_blocks_per_seq)
    full = [longest] * (budget // longest) + [budget % longest] * (budget % longest > 0)
    for lens in (full[: config.max_num_seqs], [1], [64], [512]):
        chunks = [PrefillChunk(0, [0] * min(n, full[0]), True, False, init) for n in lens]
        rows = list(range(len(lens)))
        yield ScheduledBatch(prefill=PrefillPart(rows, rows, chunks, max_context_len=full[0]))
    if longest > 1:  # a chunk after a cached prefix
        chunk = PrefillChunk(1, [0] * min(longest - 1, budget), True, False, init)
        yield ScheduledBatch(prefill=PrefillPart([0], [0], [chunk], max_context_len=longest))
    powers = {2**i for i in range(config.max_num_seqs.bit_length())}  # for the matmuls
    for batch_size in sorted({*powers, *decode_sizes, config.max_num_seqs}):
        rows = list(range(batch_size))
        yield ScheduledBatch(DecodePart(rows, rows, [], max_context_len=config.max_model_len))


def activation_bytes(run_steps: Callable[[], None], device: torch.device) -> int:
    """Returns the GPU memory that `run_steps` takes for a while, beyond what is allocated now."""
    run_steps()  # workspaces are created by the first run, and stay: they are no part of a step
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run_steps()
    return torch.cuda.max_memory_reserved(device) - before
