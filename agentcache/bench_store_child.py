"""What `agentcache bench store` measures in processes of their own: resident memory, and a store that opens after a restart.

`python -P -m agentcache.bench_store_child TASK '{...}'` prints one JSON object a line: `{"done": n}` while it works, the result
at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentcache.errors import AgentCacheError
from agentcache.store.tiers.bench import EpisodeShape, bench_memory, pooled, stored_payloads

__all__ = ["run_child"]


def run_child(
    task: str, arguments: dict[str, Any], progress: Callable[[int], object] = lambda _: None
) -> dict[str, Any]:
    """Returns what a task gives in a new process, and `process_s`: how long that process took, its start and imports inside.

    Raises:
        AgentCacheError: It failed; says why.
    """
    # -P: a folder `kernels` at the working directory would shadow a library of that name.
    command = [sys.executable, "-P", "-m", "agentcache.bench_store_child", task, json.dumps(arguments)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        result: dict[str, Any] = {}
        try:
            for line in child.stdout:
                result = json.loads(line)
                if "done" in result:
                    progress(result["done"])
            errors = child.stderr.read()
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise AgentCacheError(f"the {task} process ended with {child.returncode}: {errors.strip()[-2000:]}")
    return {**result, "process_s": time.perf_counter() - started}


def _memory(arguments: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns what episodes take in the memory tier that are made of the payloads of stored versions."""
    from agentcache.store.tiers.disk import DiskStore

    shape = EpisodeShape(**arguments["shape"])
    with DiskStore(arguments["folder"], 1 << 62) as store:
        pool = stored_payloads(store, arguments["namespace"], arguments["versions"], shape, arguments["tag"])
    every = max(1, arguments["episodes"] // 100)

    def progress(done: int) -> None:
        if done % every == 0:
            tell({"done": done})

    made = bench_memory(pooled(pool), shape, arguments["episodes"], tag=arguments["tag"], progress=progress)
    return dict(made)


def _open(arguments: dict[str, Any], _: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns how long a store takes to open whose manifests are not in the system's page cache, and one version to be read."""
    from agentcache.store.tiers import Manifest
    from agentcache.store.tiers.disk import DiskStore

    folder = Path(arguments["folder"])
    _forget(folder / "versions")
    started = time.perf_counter()
    with DiskStore(folder, 1 << 62, fingerprint=arguments["fingerprint"]) as store:
        opened = time.perf_counter()
        found = store.find(arguments["namespace"], arguments["version"])
        if not isinstance(found, Manifest):
            raise AgentCacheError(f"version {arguments['version']!r} is not found: {found}")
        store.fetch([entry.key for entry in found.objects], 0)
        read = time.perf_counter()
        versions = store.stats()[0]["versions"]
    return {"open_s": opened - started, "first_read_ms": (read - opened) * 1e3, "versions": versions}


def _forget(folder: Path) -> None:
    """Asks the system to drop the cached pages of a folder's files, which are on the disk: as after its own restart."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _tell({"memory": _memory, "open": _open}[sys.argv[1]](json.loads(sys.argv[2]), _tell))
