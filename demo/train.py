"""Train the demo model: a small Qwen3 on Jane Austen's novels, from plain text to a checkpoint.

Run: python demo/train.py --text DIR --out DIR

The text directory holds one plain-text file per novel. One novel is held out: its odd chapters
select a checkpoint of the run, and its even chapters give the figures of the model card.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from corpus import END_OF_TEXT, pack, read_chapters, save_tokenizer, train_tokenizer
from loop import mean_loss, train
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

PROMPTS = (
    "The carriage stopped before the door, and",
    "She had never been so happy as",
    '"You are very kind," said Elizabeth,',
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options, whose defaults made the model in demo/austen."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, help="directory of *.txt, one novel each")
    add("--out", type=Path, required=True, help="directory for the checkpoint")
    add("--held-out", default="persuasion", help="the novel not to train on, without .txt")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    add("--seed", type=int, default=0, help="of weights, batches, dropout and samples")
    add("--vocab-size", type=int, default=4096, help="most ids that the byte-level BPE may have")
    add("--hidden-size", type=int, default=256, help="width of the residual stream")
    add("--intermediate-size", type=int, default=704, help="width of the MLP")
    add("--layers", type=int, default=8, help="decoder layers")
    add("--heads", type=int, default=4, help="query heads, 64 wide")
    add("--kv-heads", type=int, default=2, help="key/value heads")
    add("--context", type=int, default=1024, help="tokens per sequence, and the model's limit")
    add("--batch-size", type=int, default=16, help="sequences per step")
    add("--steps", type=int, default=2000, help="optimizer steps")
    add("--warmup", type=int, default=200, help="steps of rising learning rate")
    add("--lr", type=float, default=2e-3, help="peak learning rate; a cosine takes it to 0")
    add("--weight-decay", type=float, default=2.0, help="of matrices, the embedding included")
    add("--dropout", type=float, default=0.35, help="on embeddings, attention, residual branches")
    add("--average", type=float, default=0.998, help="decay of the running average of weights")
    add("--eval-every", type=int, default=100, help="steps between validations")
    add("--sample-tokens", type=int, default=120, help="length of the printed continuations")
    return parser.parse_args(argv)


def new_model(args: argparse.Namespace, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Returns a randomly initialised Qwen3 of the sizes in `args`."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=64,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def sample(model: Qwen3ForCausalLM, tokenizer: Tokenizer, num_tokens: int) -> list[str]:
    """Returns each of `PROMPTS` with a continuation, sampled by `model.generation_config`."""
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
        mask = torch.ones_like(ids)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=num_tokens)
        texts.append(tokenizer.decode(out[0].tolist(), skip_special_tokens=False))
    return texts


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, path: Path) -> None:
    """Writes model and tokenizer as a Hugging Face checkpoint; converts the model to bfloat16."""
    end = model.config.eos_token_id
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.8, top_k=0, top_p=1.0, eos_token_id=end, pad_token_id=end
    )
    model.bfloat16().save_pretrained(path)
    save_tokenizer(tokenizer, path, model.config.max_position_embeddings)


def load_novels(args: argparse.Namespace) -> dict[str, list[str]]:
    """Returns each novel's chapters by name; exits with advice if there are too few of either."""
    novels = {path.stem: read_chapters(path) for path in sorted(args.text.glob("*.txt"))}
    if args.held_out not in novels or len(novels) < 2:
        sys.exit(f"error: {args.text} must hold {args.held_out}.txt and at least one more novel")
    if len(novels[args.held_out]) < 2:
        sys.exit(
            f"error: {args.held_out}.txt must have two chapters (a line 'Chapter 1' begins one)"
        )
    return novels


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    novels = load_novels(args)
    unseen = novels[args.held_out]
    seen = [text for name in novels if name != args.held_out for text in novels[name]]
    parts = {"train": seen, "validation": unseen[0::2], "held_out": unseen[1::2]}
    tokenizer = train_tokenizer(seen, args.vocab_size)
    streams = {name: pack(tokenizer, chapters).to(device) for name, chapters in parts.items()}
    if len(streams["train"]) <= args.context:
        sys.exit(f"error: the text to train on is shorter than --context {args.context}")
    figures: dict[str, Any] = {
        name: {
            "chapters": len(chapters),
            "bytes": sum(len(chapter.encode()) for chapter in chapters),
            "tokens": len(streams[name]) - 1,
        }
        for name, chapters in parts.items()
    }
    print(json.dumps(figures))

    model, log = train(
        new_model(args, tokenizer).to(device), streams["train"], streams["validation"], args
    )
    save(model, tokenizer, args.out)
    # The figures are those of the saved file, whose weights are rounded to bfloat16.
    model = Qwen3ForCausalLM.from_pretrained(args.out).float().to(device).eval()
    for name in ("validation", "held_out"):
        part, loss = figures[name], mean_loss(model, streams[name], args.context)
        bits = loss * part["tokens"] / math.log(2)
        part |= {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits / part["bytes"]}
    torch.manual_seed(args.seed)
    samples = sample(model, tokenizer, args.sample_tokens)
    figures |= {
        "novels": list(novels),
        "parameters": model.num_parameters(),
        "vocab_size": model.config.vocab_size,
        "file_bytes": (args.out / "model.safetensors").stat().st_size,
        "best_step": min(log, key=lambda entry: entry["validation_loss"])["step"],
        "seconds": log[-1]["seconds"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "options": {k: v for k, v in vars(args).items() if k not in ("text", "out", "device")},
    }
    report = json.dumps(figures | {"samples": samples, "log": log}, indent=2)
    (args.out / "training.json").write_text(report + "\n")
    for text in samples:
        print(f"\n{text}")
    print(f"\n{json.dumps(figures)}")


if __name__ == "__main__":
    main()
