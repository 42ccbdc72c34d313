"""Makes small engines and requests for them. Their sizes are fixed, so that no engine measures or
fills memory that others use, and a GPU captures few graphs."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import ScheduledBatch, StepHandle, StepLogprobs
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.outputs import CompletionOutput, RequestOutput, StreamOutput

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


def computed_tokens(llm: LLM) -> int:
    """Steps until all requests have finished, and returns how many prompt tokens were computed."""
    num_computed = 0
    while not llm.is_finished():
        num_computed += max(llm.step()[1], 0)
    return num_computed


@dataclass
class ScriptedStep:
    """A step that has sampled what a script says."""

    ids: Ids
    step: StepHandle

    def token_ids(self) -> Ids:
        return self.ids

    def logprobs(self) -> StepLogprobs:
        return self.step.logprobs()


def script(llm: LLM, token_ids: Ids, prompt_len: int) -> None:
    """Makes all completions of prompts of `prompt_len` tokens begin with `token_ids`, on a CPU."""
    runner: Any = llm._runner
    ids = torch.tensor([*token_ids, *[0] * llm.config.max_model_len])

    def launch(batch: ScheduledBatch) -> ScriptedStep:
        step = ModelRunner.launch(runner, batch)
        rows = batch.decode.rows if batch.decode else []
        rows = rows + (batch.prefill.sampled_rows if batch.prefill else [])
        positions = runner.rows.sampling.context_lens[rows]
        return ScriptedStep(ids[positions - prompt_len].tolist(), step)

    runner.launch = launch


Joined = dict[tuple[int, int], tuple[str, list[int], str | None]]


def joined(deltas: Iterable[StreamOutput]) -> Joined:
    """Joins the items of a stream by prompt and sample to (text, ids, finish reason)."""
    whole: Joined = defaultdict(lambda: ("", [], None))
    for delta in deltas:
        key = delta["index"], delta.get("sample", 0)
        text, token_ids, finish_reason = whole[key]
        assert finish_reason is None, "something came after the end"
        assert delta["token_ids"] or delta["finish_reason"], "an item without news"
        ids = token_ids + delta["token_ids"]
        whole[key] = text + delta["text"], ids, delta["finish_reason"]
    return dict(whole)


def as_joined(outputs: list[RequestOutput]) -> Joined:
    """Returns results in the form of `joined`."""

    def parts(output: CompletionOutput) -> tuple[str, list[int], str | None]:
        return output["text"], output["token_ids"], output["finish_reason"]

    return {
        (index, sample): parts(completion)
        for index, output in enumerate(outputs)
        for sample, completion in enumerate(output.get("outputs", [output]))
    }
