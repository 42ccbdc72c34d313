"""Evaluates a model with lm-evaluation-harness. Needs the extra `nanovllm[eval]`.

Run: python -m nanovllm.lm_eval --model_args pretrained=DIR --tasks TASK

The arguments are those of `lm_eval`, whose models cannot be extended from outside; `--model` is
"nanovllm". `pretrained` and all keywords of `LLM` are model arguments.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        maybe_truncate,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
except ImportError as error:
    raise ImportError(
        "nanovllm.lm_eval needs lm-evaluation-harness: pip install 'nanovllm[eval]'"
    ) from error

Scored = tuple[float, bool]  # the log probability of a continuation, and whether it is greedy's
Pair = tuple[list[int], list[int]]  # context and continuation


@register_model("nanovllm")
class NanoVLLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness.

    pretrained: what `LLM` takes as `model`; `keywords` are the others.
    max_gen_toks: the length of completions for which a task sets none.
    add_bos_token: whether texts get the beginning-of-sequence token; None leaves it to the
        tokenizer.
    batch_size, max_batch_size: ignored, since the engine makes its own batches.
    """

    def __init__(
        self,
        pretrained: str,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: str = "auto",
        **keywords: Any,
    ) -> None:
        super().__init__()
        if not torch.cuda.is_available() and device.startswith("cuda"):
            device = "auto"  # the harness passes "cuda:0" where nobody has chosen
        self._llm = LLM(pretrained, device=device, **keywords)
        if self._llm.tokenizer is None:
            raise ValueError(f"{pretrained} has no tokenizer, which evaluations need")
        self.tokenizer = self._llm.tokenizer
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token

    @property
    def max_length(self) -> int:
        """The most tokens of context and continuation but the last, which is only predicted."""
        return self._llm.config.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        wants = self._add_bos_token if add_special_tokens is None else add_special_tokens
        prefix = str(self.tokenizer.decode([self.prefix_token_id]))
        if add_special_tokens is None and string.startswith(prefix):
            wants = False
        options = {} if wants is None else {"add_special_tokens": wants}
        return list(self.tokenizer.encode(string, **options))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[tuple[int, Pair]] = []
        for number, request in enumerate(requests):
            pieces = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(number, utils.make_disjoint_window(piece)) for piece in pieces]
        totals = [0.0] * len(requests)
        scores = self._scores([pair for _, pair in windows], disable_tqdm)
        for (number, _), (logprob, _) in zip(windows, scores, strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: object
    ) -> list[Scored]:
        scores = self._scores([(context, rest) for _, context, rest in requests], disable_tqdm)
        for (key, _, _), score in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def _scores(self, pairs: Iterable[Pair], disable_tqdm: bool) -> list[Scored]:
        """Returns what each continuation scores after its context.

        Its last token is the only one that may be sampled after all others, which are the prompt.
        So a continuation of one token needs no log probabilities of the prompt, and contexts that
        begin alike are computed once.
        """
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        nums_scored: list[int] = []
        for context, continuation in pairs:
            token_ids = (context + continuation)[-(self.max_length + 1) :]
            num_scored = min(len(continuation), len(token_ids) - 1)
            prompts.append(token_ids[:-1])
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=1,
                    ignore_eos=True,
                    detokenize=False,
                    allowed_token_ids=token_ids[-1:],
                    logprobs=1,
                    prompt_logprobs=1 if num_scored > 1 else None,
                )
            )
            nums_scored.append(num_scored)
        scores = []
        outputs = self._llm.generate(list(prompts), params, use_tqdm=not disable_tqdm)
        for output, num_scored in zip(outputs, nums_scored, strict=True):
            best = output["logprobs"]
            if num_scored > 1:
                before = output["prompt_logprobs"][-(num_scored - 1) :]
                best = [logprobs for logprobs in before if logprobs is not None] + best
            logprob = sum(next(iter(logprobs.values())) for logprobs in best)
            # The token itself comes first, and another one follows if that is more likely.
            scores.append((logprob, all(len(logprobs) == 1 for logprobs in best)))
        return scores

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        eos = self.tokenizer.decode([self.eot_token_id])
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        stops: list[list[str]] = []
        for request in requests:
            context, given = request.args
            options = dict(normalize_gen_kwargs(given, self._max_gen_toks))
            stops.append(handle_stop_sequences(options.pop("until", None), eos=eos))
            token_ids, max_tokens = maybe_truncate(
                self.tok_encode(context),
                max_gen_toks=options.pop("max_gen_toks"),
                max_model_len=self._llm.config.max_model_len,
            )
            options.pop("do_sample", None)
            prompts.append(token_ids)
            params.append(
                SamplingParams(
                    max_tokens=max_tokens,
                    stop=[text for text in stops[-1] if text and text != eos],
                    skip_special_tokens=True,
                    **options,
                )
            )
        outputs = self._llm.generate(list(prompts), params, use_tqdm=not disable_tqdm)
        texts = []
        for request, output, until in zip(requests, outputs, stops, strict=True):
            text = postprocess_generated_text(output["text"], until, None)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the harness's command line on a nanovllm model."""
    from lm_eval.__main__ import cli_evaluate

    arguments = list(sys.argv[1:] if argv is None else argv)
    if not any(argument.split("=")[0] in ("--model", "-M") for argument in arguments):
        arguments = ["--model", "nanovllm", *arguments]
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()


if __name__ == "__main__":
    main()
