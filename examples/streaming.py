"""Prints a completion while it is made.

Run: python examples/streaming.py [--model DIR]
"""

import argparse
from pathlib import Path

from nanovllm import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "austen"
PROMPT = "It was a delightful morning, and"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    args = parser.parse_args()
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=80, stop="\n\n")
    with LLM(args.model, max_model_len=512) as llm:
        print(PROMPT, end="", flush=True)
        for delta in llm.stream(PROMPT, params):
            print(delta["text"], end="", flush=True)
            if delta["finish_reason"]:
                print(f"\n[{delta['finish_reason']}]")


if __name__ == "__main__":
    main()
