"""Is a user's script on two ranks, for tests that interrupt or kill it.

Usage: parallel_script.py MODEL WHAT DEVICE. It prints "starting", then "ready", then does WHAT: it
generates for ever (`generate`, ready in the first step) or sleeps for ever (`sleep`).
"""

import sys
import time

from nanovllm import LLM, SamplingParams

# torch's compiler, which some versions of transformers import, prints a table at exit. For that it
# would import this module, which compiles source text, and then Ctrl-C would no longer end Python.
sys.modules["tabulate"] = None  # type: ignore[assignment]

PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)


def main(model: str, what: str, device: str) -> None:
    print("starting", flush=True)
    sizes = {"max_model_len": 128, "num_kvcache_blocks": 64, "max_num_seqs": 16}
    llm = LLM(model, device=device, tensor_parallel_size=2, **sizes)
    llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    step = llm._step

    def first_step() -> object:
        print("ready", flush=True)
        llm._step = step
        return step()

    if what == "generate":
        # Prints "ready" inside a step: Ctrl-C is not deferred between two calls of `generate`.
        llm._step = first_step
    else:
        print("ready", flush=True)
    while what == "generate":
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
