"""Makes small engines and requests for them. Their sizes are fixed, so that no engine measures or
fills memory that others use, and a GPU captures few graphs."""

from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams

Ids = list[int]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, max_tokens=NUM_TOKENS, ignore_eos=True)
SIZES: dict[str, int] = {
    "max_model_len": 128,
    "max_num_seqs": 32,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 512,
    "async_scheduling": True,  # on the CPU, too: the harder of the two
}


def make_llm(checkpoint: Path | str, **config: Any) -> LLM:
    """Makes an engine of `SIZES` on the CPU; `config` overrides the sizes and the device."""
    return LLM(str(checkpoint), **({"device": "cpu"} | SIZES | config))


def make_paged_llm(checkpoint: Path | str, **config: Any) -> LLM:
    """Makes an engine whose requests, of at most 64 tokens, fill many blocks of 4."""
    sizes = {"max_model_len": 64, "kvcache_block_size": 4, "num_kvcache_blocks": 128}
    return make_llm(checkpoint, **(sizes | config))


def sampled_ids(llm: LLM, prompts: list[Ids], params: SamplingParams) -> list[Ids]:
    return [out["token_ids"] for out in llm.generate(list(prompts), params, use_tqdm=False)]


def greedy_ids(llm: LLM, prompts: list[Ids], max_tokens: int, ignore_eos: bool = True) -> list[Ids]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return sampled_ids(llm, prompts, params)


def drain(llm: LLM) -> dict[int, Ids]:
    """Steps until all requests have finished, returns the ids of each, and asserts that none is
    returned twice."""
    ids: dict[int, Ids] = {}
    while not llm.is_finished():
        finished = dict(llm.step()[0])
        assert not ids.keys() & finished.keys(), "returned twice"
        ids.update(finished)
    return ids
