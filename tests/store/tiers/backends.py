"""Back ends under test, each as short as a new one needs to be."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import redis

from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.conformance import Backend
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.files import Files
from agentcache.store.tiers.memory import MemoryStore
from agentcache.store.tiers.redis import RedisStore
from agentcache.store.tiers.tiered import TieredStore
from tests.store.tiers.redis_process import RedisProcess


class MemoryBackend(Backend):
    def open(self, budget_bytes: int = 1 << 30, fingerprint: Mapping[str, str] | None = None) -> KVStore:
        return MemoryStore(budget_bytes, fingerprint=fingerprint)

    def damage(self, store: KVStore, key: str, rank: int) -> None:
        store._blobs[key, rank][7] ^= 4  # type: ignore[attr-defined]


class FailingFiles(Files):
    """A file system that records every change, and can be made to fail: at once, or after some more changes."""

    def __init__(self, fsync: bool = False) -> None:
        super().__init__(fsync)
        self.error: OSError | None = None
        self.after = 0
        self.changes: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("_") or name in FailingFiles.__dict__ or not callable(method):
            return method

        def change(*args: Any, **options: Any) -> Any:
            self.before(name)
            result = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else None
            result = method(*args, **options) or result
            self.changes.append((name, args, result))
            return result

        return change

    def before(self, change: str) -> None:
        if self.error is not None:
            self.after -= 1
            if self.after < 0:
                raise self.error

    @contextmanager
    def failing(self, number: int, after: int = 0) -> Iterator[None]:
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
        return [lambda: self.files.failing(errno.ENOSPC), lambda: self.files.failing(errno.EROFS)]

    def close(self) -> None:
        shutil.rmtree(self.folder)


class RedisBackend(Backend):
    """A store on a server; its failures are those of a proxy whose server is gone."""

    def __init__(self, server: RedisProcess) -> None:
        self.server = server
        self.client = redis.Redis(port=server.port)
        server.flush()

    def open(self, budget_bytes: int = 1 << 30, fingerprint: Mapping[str, str] | None = None) -> KVStore:
        return RedisStore(self.server.url, budget_bytes, fingerprint=fingerprint, retry_s=0)

    def damage(self, store: KVStore, key: str, rank: int) -> None:
        [name] = self.client.keys(f"*b:{key}:{rank}")
        blob = bytearray(self.client.hget(name, "b"))
        blob[7] ^= 4
        self.client.hset(name, "b", bytes(blob))

    def failures(self) -> Sequence[Callable[[], AbstractContextManager[object]]]:
        return [self.out_of_memory, self.without_password]

    @contextmanager
    def out_of_memory(self) -> Any:
        self.client.config_set("maxmemory", "1")
        try:
            yield
        finally:
            self.client.config_set("maxmemory", "0")

    @contextmanager
    def without_password(self) -> Any:
        self.client.config_set("requirepass", "other")
        self.client.client_kill_filter(skipme=True, _type="normal")
        try:
            yield
        finally:
            self.client.config_set("requirepass", "")

    def close(self) -> None:
        self.client.close()


class TieredBackend(Backend):
    """Memory over a back end."""

    predictable = False

    def __init__(self, lower: Backend, mode: Literal["through", "behind"]) -> None:
        self.lower = lower
        self.mode = mode

    def open(self, budget_bytes: int = 1 << 30, fingerprint: Mapping[str, str] | None = None) -> KVStore:
        upper = MemoryStore(budget_bytes, fingerprint=fingerprint)
        return TieredStore(upper, self.lower.open(budget_bytes, fingerprint), mode=self.mode)

    def damage(self, store: KVStore, key: str, rank: int) -> None:
        assert isinstance(store, TieredStore)
        store.upper._blobs[key, rank][7] ^= 4
        self.lower.damage(store.lower, key, rank)

    def close(self) -> None:
        self.lower.close()


def flip(path: Path, at: int, bit: int = 4) -> None:
    """Changes one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
