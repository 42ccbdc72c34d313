"""Makes the dicts that users get from sequences that have ended."""

from typing import cast

from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, RequestOutput


def completion_output(seq: Sequence, decoder: TextDecoder | None) -> CompletionOutput:
    """Returns the result of one sample; it may be called once for each."""
    assert seq.finish_reason is not None
    output: CompletionOutput = {
        "text": _text(seq, decoder),
        "token_ids": seq.completion_token_ids,
        "finish_reason": seq.finish_reason,
        "stop_reason": seq.stop_reason,
        "prompt_token_ids": seq.token_ids[: seq.num_prompt_tokens].tolist(),
    }
    if seq.error is not None:
        output["error"] = seq.error
    if seq.logprobs is not None:
        output["logprobs"] = seq.logprobs
    if seq.prompt_logprobs is not None:
        output["prompt_logprobs"] = seq.prompt_logprobs
    if seq.times is not None:
        output["metrics"] = seq.times
    return output


def request_output(samples: list[CompletionOutput]) -> RequestOutput:
    """Returns the result of a request from those of its samples, in order."""
    result = cast(RequestOutput, dict(samples[0]))
    if len(samples) == 1:
        return result
    if "prompt_logprobs" in result:  # those of the prompt, which is computed once
        for sample in samples:
            sample["prompt_logprobs"] = result["prompt_logprobs"]
    result["outputs"] = samples
    return result


def _text(seq: Sequence, decoder: TextDecoder | None) -> str:
    if seq.text is not None:
        return seq.text.finish()
    if decoder is None or not seq.sampling_params.detokenize:
        return ""
    return decoder.decode(seq.completion_token_ids, seq.sampling_params.skip_special_tokens)
