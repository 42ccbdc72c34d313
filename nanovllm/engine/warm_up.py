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
    # Attention has other kernels for long contexts, for few tokens, and after a cached prefix.
    for length in (longest, min(512, longest)):
        lens = _fullest(config, length)
        yield _prefill(0, lens, init, max_context_len=max(lens))
    for length in (1, 64, 512):
        length = min(length, longest, budget)
        yield _prefill(0, [length], init, max_context_len=length)
    if longest > 1:
        for length in (longest, min(512, longest)):
            yield _prefill(1, _fullest(config, length - 1), init, max_context_len=length)
        for length in (longest, 2):
            yield _prefill(1, [1], init, max_context_len=length)
    powers = {2**i for i in range(config.max_num_seqs.bit_length())}  # for the matmuls
    for batch_size in sorted({*powers, *decode_sizes, config.max_num_seqs}):
        rows = list(range(batch_size))
        yield ScheduledBatch(DecodePart(rows, rows, [], max_context_len=config.max_model_len))


def _fullest(config: Config, most: int) -> list[int]:
    """Returns the numbers of tokens of as many sequences as a step can have.

    As many of them as the budget of tokens allows are `most` long, the others short.
    """
    lens = [1] * min(config.max_num_seqs, config.max_num_batched_tokens)
    spare = config.max_num_batched_tokens - len(lens)
    for i in range(len(lens)):
        more = min(most - 1, spare)
        lens[i] += more
        spare -= more
    return lens


def _prefill(start: int, lens: list[int], init: RowInit, max_context_len: int) -> ScheduledBatch:
    """Returns a step of prompts with `start` cached and `lens` new tokens each."""
    chunks = [PrefillChunk(start, [0] * n, is_last=True, is_cached=False, init=init) for n in lens]
    rows = list(range(len(lens)))
    return ScheduledBatch(prefill=PrefillPart(rows, rows, chunks, max_context_len))


def activation_bytes(run_steps: Callable[[], None], device: torch.device) -> int:
    """Returns the GPU memory that `run_steps` takes for a while, beyond what is allocated now."""
    run_steps()  # workspaces are created by the first run, and stay: they are no part of a step
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run_steps()
    return torch.cuda.max_memory_reserved(device) - before
