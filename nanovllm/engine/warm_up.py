"""Steps that the runner makes before any request: so as to compile, allocate and measure."""

from collections.abc import Iterator, Sequence

from nanovllm.config import Config
from nanovllm.engine.batch import PrefillChunk, RowInit, ScheduledBatch


def warm_up_batches(config: Config, decode_sizes: Sequence[int]) -> Iterator[ScheduledBatch]:
    """Steps that between them need all kernels and the most memory; they touch block 0 only.
    decode_sizes: how many rows must decode together for all kernels of decode attention."""
    longest, budget = config.max_model_len - 1, config.max_num_batched_tokens
    num_blocks = -(-config.max_model_len // config.kvcache_block_size)
    init = RowInit(temperature=1.0, seed=0, block_table=[0] * num_blocks)
    full = [longest] * (budget // longest) + [budget % longest] * (budget % longest > 0)
    for lens in (full[: config.max_num_seqs], [1], [64], [512]):
        chunks = [PrefillChunk(0, [0] * min(n, full[0]), is_last=True, init=init) for n in lens]
        rows = list(range(len(lens)))
        yield ScheduledBatch(rows, rows, chunks, growth=[], max_context_len=full[0])
    if longest > 1:  # a chunk after a cached prefix
        chunk = PrefillChunk(1, [0] * min(longest - 1, budget), is_last=True, init=init)
        yield ScheduledBatch([0], [0], [chunk], growth=[], max_context_len=longest)
    powers = {2**i for i in range(config.max_num_seqs.bit_length())}  # for those of products
    for num_rows in sorted({*powers, *decode_sizes, config.max_num_seqs}):
        rows = list(range(num_rows))
        yield ScheduledBatch(rows, rows, [], growth=[], max_context_len=config.max_model_len)
