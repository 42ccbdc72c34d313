"""Tests that a container's limit bounds the memory that a process may use."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nanovllm.utils import host_memory as host_memory_module
from nanovllm.utils.host_memory import HostMemory, host_memory


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", (9000, 10_000)), ("5000", (1700, 5000)), ("20000", (9000, 10_000)), ("1", (0, 1))],
)
def test_host_memory_is_that_of_the_container(
    limit: str, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=9000, total=10_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_memory_module, "CGROUP", tmp_path)
    assert host_memory() == HostMemory(9000, 10_000), "there is no cgroup"
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 700\n")
    assert host_memory() == HostMemory(*expected)
