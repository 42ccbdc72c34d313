"""Answers conversations through a chat template.

Run: python examples/chat.py [--model DIR]
"""

import argparse
from pathlib import Path

from nanovllm import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "austen"
# The demo model was not trained on conversations: this template makes a dialogue of a novel of one.
TEMPLATE = """\
{% for message in messages %}"{{ message.content }}" said {{ message.role }}.

{% endfor %}"I"""
CONVERSATIONS = [
    [{"role": "Elizabeth", "content": "Do you dance, Mr. Darcy?"}],
    [
        {"role": "Emma", "content": "You must come to Hartfield."},
        {"role": "Harriet", "content": "With pleasure."},
        {"role": "Emma", "content": "Then we expect you on Thursday."},
    ],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a chat checkpoint, whose own template is used")
    args = parser.parse_args()
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=0, max_tokens=40)
    with LLM(args.model or str(DEMO_MODEL), max_model_len=512) as llm:
        template = None if args.model else TEMPLATE
        outputs = llm.chat(CONVERSATIONS, params, use_tqdm=False, chat_template=template)
    for conversation, output in zip(CONVERSATIONS, outputs, strict=True):
        print(f"{conversation[-1]['content']}\n  -> {output['text']!r}")


if __name__ == "__main__":
    main()
