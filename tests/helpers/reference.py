"""Computes Hugging Face's answers, one sequence at a time, and the engine's in the same form."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM
from nanovllm.engine.captured_steps import Sampled
from nanovllm.engine.model_runner import ModelRunner
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
    redrawn = ModelRunner._redrawn  # gets the logits of every step, CUDA graph or not

    def watched(self: ModelRunner, sampled: Sampled, rows: list[int], *rest: Any) -> torch.Tensor:
        if self is llm._runner and rows:
            captured.append(sampled[1][: len(rows)].float().cpu())
        return redrawn(self, sampled, rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_redrawn", watched)
        greedy_ids(llm, prompts, max_tokens=1)
    return torch.cat(captured)
