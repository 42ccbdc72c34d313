"""Offline batch inference of decoder-only language models.

`LLM` loads a local checkpoint and generates; `SamplingParams` says how to sample one request;
`RequestOutput` is the dict that `LLM.generate` returns for each prompt. `NumericalError` says that
logits were no numbers.
"""

from importlib import metadata

from nanovllm.llm import LLM, NumericalError, sample_seed
from nanovllm.outputs import RequestOutput, StreamOutput
from nanovllm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "NumericalError",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "__version__",
    "sample_seed",
]

try:
    __version__ = metadata.version("nanovllm")
except metadata.PackageNotFoundError:  # a checkout on the path that is not installed
    __version__ = "0+unknown"
