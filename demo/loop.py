"""The training loop: AdamW, dropout, a cosine schedule, a running average of the weights, and the
loss on held-out text."""

import argparse
import copy
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3ForCausalLM

IGNORED = -100  # as a target: the position is not scored


def add_dropout(model: Qwen3ForCausalLM, p: float) -> None:
    """Adds dropout to embeddings and residual branches, and sets that of the attention weights.

    The last is the only dropout that Qwen3 has by itself.
    """

    def drop(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, p, training=module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = p
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Returns an AdamW that decays matrices but not norm weights."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=matrices[0].is_cuda)


@torch.inference_mode()
def mean_loss(model: Qwen3ForCausalLM, stream: torch.Tensor, context: int) -> float:
    """Returns the mean loss, in nats, over the tokens of `stream` after the first.

    Windows overlap by half and score their second half, so that after the first window each token
    is predicted from at least `context // 2` others.
    """
    stride, num_targets = context // 2, len(stream) - 1
    num_more = math.ceil(max(0, num_targets - context) / stride)  # windows after the first
    padding = context + 1 + num_more * stride - len(stream)
    windows = F.pad(stream, (0, padding), value=IGNORED).unfold(0, context + 1, stride)
    targets = windows[:, 1:].clone()  # [num_windows, context]
    targets[1:, : context - stride] = IGNORED
    inputs = windows[:, :-1].clamp(min=0)  # padding comes last, so no scored token sees it
    total = 0.0
    for some_inputs, some_targets in zip(inputs.split(8), targets.split(8), strict=True):
        logits = model(input_ids=some_inputs, use_cache=False).logits.float()
        total += F.cross_entropy(
            logits.flatten(0, 1), some_targets.flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
    return total / num_targets


def train(
    model: Qwen3ForCausalLM,
    stream: torch.Tensor,
    validation: torch.Tensor,
    args: argparse.Namespace,
) -> tuple[Qwen3ForCausalLM, list[dict[str, float]]]:
    """Trains the model; returns the running average of its weights, as it was when its loss on
    `validation` was lowest, and the log of all validations."""
    average = copy.deepcopy(model).eval()
    model.train()
    add_dropout(model, args.dropout)
    optimizer = make_optimizer(model, args)
    span = torch.arange(args.context + 1, device=stream.device)
    best_weights: dict[str, torch.Tensor] = {}
    log: list[dict[str, float]] = []
    loss_sum, last_step, begin = torch.zeros((), device=stream.device), 0, time.perf_counter()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            cosine = 0.5 + 0.5 * math.cos(math.pi * step / args.steps)
            group["lr"] = args.lr * min(1.0, step / args.warmup) * cosine
        starts = torch.randint(
            len(stream) - args.context, (args.batch_size, 1), device=stream.device
        )
        batch = stream[starts + span]  # [batch_size, context + 1]
        with torch.autocast(stream.device.type, torch.bfloat16, enabled=stream.is_cuda):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss_sum += loss.detach()
        # A short memory at first, so that the average forgets the random weights.
        decay = min(args.average, step / (step + 10))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
        if step % args.eval_every and step != args.steps:
            continue
        entry = {
            "step": step,
            "train_loss": loss_sum.item() / (step - last_step),
            "validation_loss": mean_loss(average, validation, args.context),
            "seconds": time.perf_counter() - begin,
        }
        if not log or entry["validation_loss"] < min(e["validation_loss"] for e in log):
            best_weights = {k: v.clone() for k, v in average.state_dict().items()}
        log.append(entry)
        loss_sum.zero_()
        last_step = step
        speed = step * args.batch_size * args.context / entry["seconds"]
        print(
            f"step {step}/{args.steps}  train {entry['train_loss']:.4f}  validation "
            f"{entry['validation_loss']:.4f}  {speed:,.0f} tok/s  {entry['seconds']:.0f} s",
            flush=True,
        )
    average.load_state_dict(best_weights)
    return average, log
