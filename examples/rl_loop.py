"""Reinforcement learning in the style of GRPO: sample, score, train, put the weights to use.

The demo model learns to use a word more often. In each round nanovllm samples several completions
of each prompt, a reward scores them, one step of policy gradient changes the weights of the Hugging
Face model, and `update_weights` gives them to the engine. The advantage of a sample is how much
better it is than the others of its prompt (Shao et al. 2024, arXiv:2402.03300).

Run: python examples/rl_loop.py    (about a minute on a CPU)
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "demo" / "austen"
WORD = "her"
PROMPTS = ["She had", "Elizabeth", "It was", "Mr. Darcy", "In the evening", "My dear", "When", "As"]
NUM_SAMPLES = 8
MAX_TOKENS = 16


def reward(text: str) -> float:
    """Counts the word."""
    return float(text.split().count(WORD))


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Returns rewards [prompts, samples] relative to those of the same prompt."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def loss(
    model: torch.nn.Module, prompt: Sequence[int], samples: list[list[int]], weights: torch.Tensor
) -> torch.Tensor:
    """Returns the policy gradient's loss for samples, of equal length, of one prompt."""
    ids = torch.tensor([[*prompt, *sample] for sample in samples])  # [samples, tokens]
    logprobs = log_softmax(model(ids).logits[:, len(prompt) - 1 : -1].float(), dim=-1)
    chosen = logprobs.gather(2, ids[:, len(prompt) :, None]).squeeze(2)
    return -(weights[:, None] * chosen).mean()


def train(num_rounds: int) -> list[float]:
    """Trains and returns the mean reward of each round."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    means = []
    with LLM(str(MODEL), max_model_len=64, dtype="float32") as llm:
        for number in range(num_rounds):
            params = SamplingParams(
                n=NUM_SAMPLES, max_tokens=MAX_TOKENS, ignore_eos=True, seed=number
            )
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            rewards = torch.tensor(
                [[reward(sample["text"]) for sample in output["outputs"]] for output in outputs]
            )
            optimizer.zero_grad()
            for output, weights in zip(outputs, advantages(rewards), strict=True):
                samples = [sample["token_ids"] for sample in output["outputs"]]
                loss(model, output["prompt_token_ids"], samples, weights).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            llm.update_weights(model.named_parameters())
            means.append(rewards.mean().item())
            print(f"round {number}: mean reward {means[-1]:.3f}", flush=True)
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    train(parser.parse_args().rounds)
