"""Tests, on the source, that imports point one way and that only certain files import heavy
packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.faults import STARTING

MODULES = sorted((ROOT / "nanovllm").rglob("*.py"))
LEAVES = {"config", "outputs", "sampling_params"}
# Part of the package -> the other parts that it may import.
ALLOWED = {
    "utils": {"sampling_params"},
    "kernels": {"utils"},
    "layers": {"utils", "kernels"},
    "models": {"utils", "layers"},
    "engine": {"utils", "kernels", "layers", "models"} | LEAVES,
    "llm": {"engine"} | LEAVES,
    "batch": {"engine", "llm", "ray"} | LEAVES,
    "ray": {"batch", "sampling_params"},
    "lm_eval": {"llm", "sampling_params"},
    "report": {"config", "kernels", "layers", "models", "utils"},
    "__init__": {"llm"} | LEAVES,
    "config": {"sampling_params", "layers", "models", "utils"},
} | {"outputs": set[str](), "sampling_params": {"utils"}}
# Package -> the path prefixes that may import it.
CONFINED = {
    "triton": ("kernels/",),
    "numba": ("kernels/cpu/",),
    "llvmlite": ("kernels/cpu/",),
    "flash_attn": ("layers/attention_backends/",),
    "torch.distributed": ("utils/distributed.py", "utils/gpu_links.py"),
    "multiprocessing": (
        "engine/executor.py",
        "engine/worker",
        "engine/rank_process.py",
        "batch/engine_processes.py",
    ),
    "pyarrow": ("batch/parquet.py", "batch/on_ray.py", "ray.py"),
    "ray": ("batch/on_ray.py", "ray.py"),
    "lm_eval": ("lm_eval.py",),
    "torch.multiprocessing": (),
}
TORCH_FREE = [
    f"engine/{name}.py"
    for name in (
        "scheduler",
        "block_manager",
        "sequence",
        "batch",
        "ipc",
        "shared_prefix",
        "admission",
        "prefix_groups",
        "row_init",
        "stop_rules",
        "seeds",
        "completion_text",
    )
]


def name_of(module: Path) -> str:
    return module.relative_to(ROOT / "nanovllm").as_posix()


def imports_of(source: str) -> set[str]:
    """Returns the dotted names of everything that `source` imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names.update(str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
    return names


def is_under(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def breaches(module: str, source: str) -> list[str]:
    """Returns the imports of `source` that the file `module` may not have."""
    own = module.removesuffix(".py").split("/")[0]
    found = []
    for name in sorted(imports_of(source)):
        package, *rest = name.split(".")
        if package == "nanovllm" and (not rest or rest[0] not in ALLOWED[own] | {own}):
            found.append(name)
        for confined, homes in CONFINED.items():
            if is_under(name, confined) and not module.startswith(homes):
                found.append(name)
        if is_under(name, "torch") and module in TORCH_FREE:
            found.append(name)
    return found


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_imports_point_one_way(module: Path) -> None:
    assert breaches(name_of(module), module.read_text()) == []


def test_the_torch_free_modules_exist() -> None:
    assert set(TORCH_FREE) <= set(map(name_of, MODULES))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("utils/context.py", "from nanovllm.config import Config"),
        ("kernels/norm.py", "import nanovllm.layers.linear"),
        ("layers/linear.py", "from nanovllm.models import qwen3"),
        ("layers/linear.py", "def f():\n    import triton.language as tl"),
        ("models/qwen3.py", "from nanovllm.engine.batch import ScheduledBatch"),
        ("engine/llm_engine.py", "from nanovllm import LLM"),
        ("engine/batch.py", "from torch import nn"),
        ("engine/cuda_graph.py", "from multiprocessing.shared_memory import SharedMemory"),
        ("engine/model_runner.py", "from torch import distributed as dist"),
        ("layers/attention.py", "from flash_attn import flash_attn_func"),
        ("layers/cpu_weights.py", "from llvmlite import ir"),
        ("llm.py", "import importlib\nimportlib.import_module('triton')"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert len(breaches(module, source)) == 1


IMPORT_ALL = """
import importlib, multiprocessing.reduction, signal, sys
del multiprocessing.reduction.DupFd, signal.pthread_sigmask  # not there on Windows
for package in sys.argv[1].split():
    sys.modules[package] = None  # importing it raises ImportError
import nanovllm
assert {"LLM", "SamplingParams"} <= set(nanovllm.__all__)
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_imports_without_optional_packages() -> None:
    """All files can be imported except those that exist for such a package, which are imported on
    demand."""
    packages = ("triton", "flash_attn", "pyarrow", "ray", "lm_eval")
    homes = tuple(home for package in packages for home in CONFINED[package])
    paths = [name_of(module) for module in MODULES if not name_of(module).startswith(homes)]
    names = [f"nanovllm.{path.removesuffix('.py').replace('/', '.')}" for path in paths]
    names = [name.removesuffix(".__init__") for name in names]
    script = [sys.executable, "-c", IMPORT_ALL, " ".join(packages), *names]
    subprocess.run(script, check=True, cwd=ROOT, timeout=STARTING)
