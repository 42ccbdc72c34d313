"""Chat with a checkpoint: two questions through its chat template, sampled in one batch.

Run: python example.py --model DIR
"""

import argparse
import sys
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from nanovllm import LLM, SamplingParams

QUESTIONS = ["introduce yourself", "list all prime numbers within 100"]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The question as one user turn; unchanged where the checkpoint has no chat template."""
    if not tokenizer.chat_template:
        return question
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--model",
        default="~/huggingface/Qwen3-0.6B/",
        help="checkpoint directory (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
    try:
        llm = LLM(args.model, enforce_eager=True)
    except ValueError as error:  # what the user can mend; the text says how
        sys.exit(f"error: {error}")
    with llm:
        if llm.tokenizer is None:
            sys.exit(f"error: {args.model} has no tokenizer, which text prompts need")
        outputs = llm.generate(
            [chat_prompt(llm.tokenizer, question) for question in QUESTIONS], sampling_params
        )
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\nPrompt: {question!r}\nCompletion: {output['text']!r}")


if __name__ == "__main__":
    main()
