"""What becomes of a request whose logits are no numbers: it ends, the others go on, and then the
call raises."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_REMEDIES = {
    torch.float16: "float16 only holds numbers up to 65504, try dtype='bfloat16' or 'float32'",
    torch.bfloat16: "try dtype='float32'; if that fails as well, the weights are wrong",
    torch.float32: "with dtype='float32' the weights are wrong, or of another kind of model",
}


class NumericalError(RuntimeError):
    """Says which requests had logits that were NaN or infinite, where, and what to try.

    outputs: the results of the call, in order. Those of the requests that failed have the tokens up
        to there, `finish_reason` "abort" and the reason in `error`. Of a stream, which has yielded
        its results before it raises, it has none.
    """

    def __init__(self, errors: Mapping[str, str], outputs: Sequence[Any] = ()) -> None:
        """errors: what failed, such as "prompt 3", and why."""
        what, why = next(iter(errors.items()))
        others = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        super().__init__(f"{what}{others}: {why}")
        self.outputs = list(outputs)


def not_finite(num_prompt_tokens: int, num_completion_tokens: int, dtype: torch.dtype) -> str:
    """Says where the logits of a request in `dtype` were no numbers, and what to try."""
    return (
        f"the logits at position {num_prompt_tokens + num_completion_tokens} (after "
        f"{num_prompt_tokens} tokens of the prompt and {num_completion_tokens} of the completion) "
        f"are NaN or infinite, so no token can be drawn; {_REMEDIES[dtype]}"
    )
