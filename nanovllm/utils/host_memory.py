"""Memory of the host, or of the container (cgroup v2) that this process is confined to."""

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # where a container sees its limits; outside of one there are none


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory that this process can still take, and bytes in all."""

    available: int
    total: int


def host_memory() -> HostMemory:
    """Returns the memory of the host, or of the container where its limit is tighter."""
    memory = psutil.virtual_memory()
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        reclaimable = int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # no cgroup v2, or its limit is "max"
        return HostMemory(memory.available, memory.total)
    available = min(memory.available, max(limit - used + reclaimable, 0))
    return HostMemory(available, min(memory.total, limit))
