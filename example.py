"""Generates text: the small model in demo/austen continues three openings, or with `--model DIR` a
chat checkpoint answers two questions through its chat template.

Run: python example.py [--model DIR]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nanovllm import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parent / "demo" / "austen"
OPENINGS = [
    "The carriage stopped before the door, and",
    "She had never been so happy as",
    '"You are very kind," said Elizabeth, "but I',
]
QUESTIONS = ["introduce yourself", "list all prime numbers within 100"]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Returns the question as one user turn, or unchanged if there is no chat template."""
    if not tokenizer.chat_template:
        return question
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def continue_openings() -> None:
    """Prints continuations by the demo model, whose context is 1,024 tokens."""
    with LLM(str(DEMO_MODEL), enforce_eager=True, max_model_len=1024) as llm:
        outputs = llm.generate(OPENINGS, SamplingParams(temperature=0.8, max_tokens=120))
    for opening, output in zip(OPENINGS, outputs, strict=True):
        print(f"\n{opening}{output['text']}\n\n* * *")


def ask_questions(model: str) -> None:
    """Prints a chat model's answers; raises `ValueError` if the checkpoint has no tokenizer."""
    with LLM(model, enforce_eager=True) as llm:
        if llm.tokenizer is None:
            raise ValueError(f"{model} has no tokenizer, which text prompts need")
        prompts = [chat_prompt(llm.tokenizer, question) for question in QUESTIONS]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=256))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\nPrompt: {question!r}\nCompletion: {output['text']!r}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate some text.")
    parser.add_argument(
        "--model",
        help="directory of a chat checkpoint, e.g. ~/huggingface/Qwen3-0.6B/ "
        "(default: the demo model, which continues text)",
    )
    args = parser.parse_args(argv)
    try:
        if args.model is None:
            continue_openings()
        else:
            ask_questions(args.model)
    except ValueError as error:  # the user can fix it; the message says how
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
