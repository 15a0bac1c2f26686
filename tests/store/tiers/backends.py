"""Back ends under test, each as short as a new one needs to be."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.conformance import Backend
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.files import Files
from agentcache.store.tiers.memory import MemoryStore


class MemoryBackend(Backend):
    def open(self, budget_bytes: int = 1 << 30, fingerprint: Mapping[str, str] | None = None) -> KVStore:
        return MemoryStore(budget_bytes, fingerprint=fingerprint)

    def damage(self, store: KVStore, key: str, rank: int) -> None:
        store._blobs[key, rank][7] ^= 4  # type: ignore[attr-defined]


class FailingFiles(Files):
    """A file system that can be made to fail: all changes, or the n-th from now on."""

    def __init__(self, fsync: bool = False) -> None:
        super().__init__(fsync)
        self.error: OSError | None = None
        self.after = 0
        self.changes: list[tuple[str, str]] = []

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("_") or not callable(method):
            return method

        def change(*args: Any) -> Any:
            if self.error is not None:
                self.after -= 1
                if self.after < 0:
                    raise self.error
            self.changes.append((name, str(args[0])))
            return method(*args)

        return change

    @contextmanager
    def failing(self, number: int, after: int = 0) -> Any:
        self.error, self.after = OSError(number, "injected"), after
        try:
            yield
        finally:
            self.error = None


class DiskBackend(Backend):
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.files = FailingFiles()

    def open(self, budget_bytes: int = 1 << 30, fingerprint: Mapping[str, str] | None = None) -> KVStore:
        return DiskStore(self.folder, budget_bytes, fingerprint=fingerprint, files=self.files)

    def damage(self, store: KVStore, key: str, rank: int) -> None:
        [entry] = [r.entry for k, r in store._catalog.ledger.records.items() if k == key]  # type: ignore[attr-defined]
        save, _, offsets = entry.place.partition(":")
        flip(self.folder / "payloads" / f"{save}.{rank}.safetensors", int(offsets.split(",")[rank]) + 7)

    def failures(self) -> Sequence[Callable[[], AbstractContextManager[object]]]:
        return [lambda: self.files.failing(28), lambda: self.files.failing(30)]  # ENOSPC, EROFS

    def close(self) -> None:
        shutil.rmtree(self.folder)


def flip(path: Path, at: int, bit: int = 4) -> None:
    """Changes one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
