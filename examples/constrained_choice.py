"""Lets the model choose one of a few answers, and shows how likely it finds each.

Run: python examples/constrained_choice.py [--model DIR]
"""

import argparse
from math import exp
from pathlib import Path

from nanovllm import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "austen"
CHOICES = [" he", " she", " it", " they"]
PROMPTS = ["Elizabeth smiled, and", "When Mr. Darcy had gone,", "The house was large;"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    args = parser.parse_args()
    with LLM(args.model, max_model_len=512) as llm:
        assert llm.tokenizer is not None
        # The first token of each choice stands for it.
        ids = {llm.tokenizer.encode(text, add_special_tokens=False)[0]: text for text in CHOICES}
        params = SamplingParams(
            temperature=0, max_tokens=1, allowed_token_ids=list(ids), logprobs=20
        )
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (logprobs,) = output["logprobs"]
        shown = {ids[i]: round(exp(p), 3) for i, p in logprobs.items() if i in ids}
        print(f"{prompt}{ids[output['token_ids'][0]]}   {shown}")


if __name__ == "__main__":
    main()
