"""Computes Hugging Face's answers, one sequence at a time, and the engine's in the same form."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM
from tests.helpers.engines import greedy_ids


class HuggingFace:
    """Runs the reference model of a checkpoint in fp32."""

    def __init__(self, path: Path | str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
        self.model = self.model.float().eval()

    @torch.inference_mode()
    def last_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Returns the logits [vocab] after the last token."""
        logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits
        return logits[0, -1]

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int, stop: frozenset[int]) -> list[int]:
        """Decodes up to `num_tokens` ids greedily, and includes the stop id if it ends at one."""
        ids, past, completion = torch.tensor([prompt]), None, list[int]()
        while len(completion) < num_tokens and not stop.intersection(completion[-1:]):
            out = self.model(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            completion.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([completion[-1:]])
        return completion


def next_token_logits(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """Returns the logits that the first token of each prompt is sampled from, [len(prompts),
    vocab].

    They are prefilled in order, in as many steps as they need.
    """
    captured: list[torch.Tensor] = []
    assert llm._runner is not None
    hook = llm._runner.sampler.register_forward_pre_hook(
        lambda _, args: captured.append(args[0].float().cpu())
    )
    try:
        greedy_ids(llm, prompts, max_tokens=1)
    finally:
        hook.remove()
    return torch.cat(captured)
