"""Tests how much memory of the host loading takes beside the model's own, on checkpoints of zeros
that take no space on the disk."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from nanovllm.models import model_outline
from nanovllm.utils.distributed import TPGroup
from tests.helpers import ROOT
from tests.helpers.faults import STARTING

LOAD = """
import sys
from pathlib import Path
import torch
from transformers import AutoConfig
from nanovllm.layers import cpu_weights
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.utils import cpu_features
from nanovllm.utils.checkpoint import Checkpoint
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import load_model

def kilobytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

# Another layout would be another copy of each weight.
cpu_features.has_onednn = cpu_weights.cpu_multiplies = lambda *_: False
path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config, checkpoint = AutoConfig.from_pretrained(path), Checkpoint(path)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(
    config, TPGroup(rank, size), tie_word_embeddings=False, max_model_len=64
)
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
assert checkpoint.is_tied(True)  # compares both
load_model(model, checkpoint, model.packed_modules_mapping)
own = sum(param.nbytes for param in model.parameters()) // 1024
print(1024 * (kilobytes("VmHWM") - before - own))
"""
DTYPES = {"BF16": 2, "F32": 4}
# Layers and vocabulary of a model whose checkpoint has about so many bytes in bfloat16.
SHAPES = {2**28: (1, 25_000), 2**31: (10, 150_000)}


def write_zeros(path: Path, num_bytes: int, dtype: str) -> tuple[int, int]:
    """Writes a checkpoint as a file of holes; returns the bytes of all tensors and the largest."""
    num_layers, vocab_size = SHAPES[num_bytes]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(path)
    outline = model_outline(config, TPGroup(), max_model_len=64, tie_word_embeddings=False)
    header: dict[str, dict[str, object]] = {}
    offset = largest = 0
    for name, param in outline.named_parameters():
        *module, last, kind = name.split(".")
        parts = outline.packed_modules_mapping.get(last, (last,))
        rows = [param.shape[0] // len(parts)] * len(parts)
        if last == "qkv_proj":
            rows = [param.shape[0] // 2, param.shape[0] // 4, param.shape[0] // 4]
        for part, num_rows in zip(parts, rows, strict=True):
            shape = [num_rows, *param.shape[1:]]
            size = torch.Size(shape).numel() * DTYPES[dtype]
            header[".".join([*module, part, kind])] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [offset, offset + size],
            }
            offset, largest = offset + size, max(largest, size)
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(file.tell() + offset)
    return offset, largest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("num_bytes", "dtype", "num_ranks"),
    [
        (2**28, "BF16", 1),
        pytest.param(2**31, "BF16", 1, marks=pytest.mark.slow),
        pytest.param(2**31, "F32", 2, marks=pytest.mark.slow),
    ],
)
def test_loading_takes_less_than_the_largest_tensor(
    num_bytes: int, dtype: str, num_ranks: int, tmp_path: Path
) -> None:
    if num_bytes > 2**30 and "NANOVLLM_TEST_MODEL" not in os.environ:
        pytest.skip("NANOVLLM_TEST_MODEL is not set, so large tests are skipped")
    total, largest = write_zeros(tmp_path, num_bytes, dtype)
    assert total * 2 / DTYPES[dtype] > 0.9 * num_bytes
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(num_ranks - 1), str(num_ranks)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=STARTING,
        check=True,
    )
    peak = int(result.stdout)
    print(f"{total / 2**20:.0f} MiB, largest {largest / 2**20:.0f}: {peak / 2**20:.0f} at most")
    assert peak < largest
