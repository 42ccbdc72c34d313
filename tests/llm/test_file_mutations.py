"""Damages the files of checkpoints at random: an engine answers as before, or a `ValueError` says
why it does not.

`NANOVLLM_TEST_MUTATIONS=5000` runs so many cases instead of the suite's few. Case i is always the
same.
"""

import json
import logging
import os
import random
import resource
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from tests.helpers.checkpoints import edit_json, make_checkpoint, rope_fields
from tests.helpers.engines import Ids, greedy_ids, make_llm
from tests.helpers.mutations import mutate

NUM_CASES = int(os.environ.get("NANOVLLM_TEST_MUTATIONS", "200"))
SIZES = {"max_model_len": 64, "num_kvcache_blocks": 9, "max_num_seqs": 4}
MIB = 2**20
# Beyond those in use. Far more than any case maps, even in threads: libraries may abort without.
MOST_ADDRESSES = 32 * 2**30
MOST_MEMORY = 256 * MIB  # beyond the peak of sound checkpoints
LONGEST_MESSAGE = 1500
ROPE = {"factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 = ROPE | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Other values of these ask for another model of the same shape.
CHANGING = {
    "rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps", "max_position_embeddings",
    "tie_word_embeddings", "dtype", "torch_dtype", "num_experts_per_tok", "norm_topk_prob",
    "architectures", "model_type",
}  # fmt: skip


def split(path: Path) -> None:
    """Replaces a checkpoint's file of weights by two and an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    files = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors"
        for i, name in enumerate(sorted(tensors))
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("sound")
    qwen = make_checkpoint(path / "qwen")
    (qwen / "generation_config.json").write_text('{"eos_token_id": [1, 3], "top_p": 0.5}')
    edit_json(qwen / "config.json", eos_token_id=[1, 2])
    llama = make_checkpoint(
        path / "llama", "LlamaForCausalLM", **rope_fields(1e4, rope_type="llama3", **LLAMA3)
    )
    moe = make_checkpoint(
        path / "moe",
        "Qwen3MoeForCausalLM",
        with_tokenizer=False,
        **rope_fields(1e4, rope_type="yarn", **ROPE),
    )
    split(qwen)
    split(llama)
    return [qwen, qwen, llama, moe]


def answer(path: Path) -> Ids:
    """Returns the ids after a prompt of ids; texts and conversations may be refused instead."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, stop="zz")
    with make_llm(path, **SIZES) as llm:
        if llm.tokenizer is not None:
            with suppress(ValueError):
                llm.generate(["list all é"], params, use_tqdm=False)
            with suppress(ValueError):
                llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)
        return greedy_ids(llm, [[7, 8, 9]], 4)[0]


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Lets allocations fail that would take much, and checks that little was used."""
    if sys.platform != "linux":
        yield
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_ADDRESSES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
    assert grown < MOST_MEMORY, f"took {grown / MIB:.0f} MiB"


@contextmanager
def unheard() -> Iterator[None]:
    """Drops logs and warnings: they quote damaged files, and pytest-xdist cannot send lone
    surrogates."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def fault(number: int, checkpoints: list[Path], expected: dict[Path, Ids], path: Path) -> str:
    """Returns what went wrong in a case, nothing if all is well.

    path: where the damaged checkpoint may be made.
    """
    rng = random.Random(number)
    sound = rng.choice(checkpoints)
    shutil.copytree(sound, path)
    files = [f for f in sorted(path.iterdir()) if f.suffix in (".json", ".safetensors")]
    weights = [3 if file.name == "config.json" else 1 for file in files]
    file = rng.choices(files, weights)[0]
    mutation = mutate(file, rng)
    case = f"case {number}, {sound.name}/{file.name}, {mutation.what}: "
    try:
        ids = answer(path)
    except ValueError as error:
        length = len(str(error))
        return "" if length < LONGEST_MESSAGE else f"{case}a message of {length} characters"
    except BaseException as error:
        return f"{case}{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(path)
    is_same = ids == expected[sound] or CHANGING & set(mutation.fields)
    return "" if is_same else f"{case}{ids} instead of {expected[sound]}"


@pytest.mark.timeout(600 + NUM_CASES)
def test_mutated_files_are_refused_or_harmless(checkpoints: list[Path], tmp_path: Path) -> None:
    expected = {path: answer(path) for path in checkpoints}
    with bounded_memory(), unheard():
        found = [
            fault(number, checkpoints, expected, tmp_path / "mutated")
            for number in range(NUM_CASES)
        ]
    assert not list(filter(None, found)), ascii("\n".join(filter(None, found)))
