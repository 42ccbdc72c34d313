"""Samples several answers to a question, and takes the one that comes most often.

Run: python examples/self_consistency.py [--model DIR]
"""

import argparse
from collections import Counter
from pathlib import Path

from nanovllm import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "austen"
PROMPT = "Mr. Darcy looked at Miss"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    args = parser.parse_args()
    # The prompt is computed once for all samples.
    params = SamplingParams(n=32, temperature=0.7, seed=0, max_tokens=6)
    with LLM(args.model, max_model_len=512) as llm:
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    words = [sample["text"].split() for sample in output["outputs"]]
    votes = Counter(answer[0].strip(",.;:!?\"'") for answer in words if answer)
    for answer, count in votes.most_common(3):
        print(f"{count:3d} of {params.n}: {PROMPT} {answer}")


if __name__ == "__main__":
    main()
