"""What many paused episodes take: bytes in a store against the bytes of their distinct tokens, and how fast it opens again."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from agentcache.store.extents import OBJECT_TOKENS, Extent, merge_extents, overlap
from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.disk import DiskStore
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, StoredExtent, new_key
from agentcache.store.tiers.memory import MemoryStore
from agentcache.store.tiers.outcomes import Blob, Lost, Refused
from agentcache.types import Run, complement

__all__ = ["TierBench", "TierBenchRow", "bench_tiers"]

Rows = np.ndarray[Any, np.dtype[np.uint8]]
FINGERPRINT = {"model": "bench"}


class TierBenchRow(TypedDict):
    """One tier's figures. `bytes` is what the tier really takes: blocks on disk, resident pages in memory.

    `ratio` is to the distinct tokens' bytes; `accounted_bytes` is what its budget counts.
    """

    tier: str
    paused_episodes: int
    versions: int
    distinct_bytes: int
    bytes: int
    accounted_bytes: int
    ratio: float
    save_ms: float
    open_s: float | None
    find_ms: float
    fetch_gb_s: float


class TierBench(TypedDict):
    """All of `bench_tiers`."""

    row_bytes: int
    tokens: int
    edits: int
    changed_tokens: int
    tiers: list[TierBenchRow]


def bench_tiers(
    rows: Rows,
    folder: Path,
    *,
    episodes: int = 1000,
    memory_episodes: int | None = None,
    tokens: int = 512,
    edits: int = 10,
    changed: int = 32,
    fsync: bool = True,
    seed: int = 0,
) -> TierBench:
    """Returns what paused episodes take on disk and in memory, and how fast the disk store opens after a restart.

    Args:
        rows: `[N, row_bytes]` real KV rows as bytes of one rank, all layers, in whatever precision; used in a circle.
        folder: A new folder for the disk store; it stays.
        episodes: Paused episodes.
        memory_episodes: The same for memory, where all of them have to fit; None: as many.
        tokens: Of an episode's first version.
        edits: Further versions of each episode, each a child of the one before.
        changed: Tokens that each of them replaces, somewhere.
        fsync: See `DiskStore`.
        seed: Of the edits' places.

    Raises:
        RuntimeError: A save was refused, or something read is not what was stored.
    """
    count = episodes if memory_episodes is None else memory_episodes
    sizes = {"tokens": tokens, "edits": edits, "changed": changed}
    before = _resident_bytes()
    with MemoryStore(1 << 62, fingerprint=FINGERPRINT) as memory:
        made = _fill(memory, _Episodes(rows, seed=seed, **sizes), count)
        in_memory = _row(memory, made, count, _resident_bytes() - before, None)
    with DiskStore(folder, 1 << 62, fsync=fsync, fingerprint=FINGERPRINT) as disk:
        made = _fill(disk, _Episodes(rows, seed=seed, **sizes), episodes)
    started = time.perf_counter()
    with DiskStore(folder, 1 << 62, fsync=fsync, fingerprint=FINGERPRINT) as disk:
        opened = time.perf_counter() - started
        on_disk = _row(disk, made, episodes, _disk_bytes(folder), opened)
    return {
        "row_bytes": rows.shape[1],
        "tokens": tokens,
        "edits": edits,
        "changed_tokens": changed,
        "tiers": [in_memory, on_disk],
    }


@dataclass
class _Filled:
    versions: int = 0
    distinct_bytes: int = 0
    save_ms: list[float] = field(default_factory=list)
    sample: dict[str, dict[str, Blob]] = field(default_factory=dict)


class _Episodes:
    """Makes the versions of paused episodes, one after another."""

    def __init__(self, rows: Rows, *, tokens: int, edits: int, changed: int, seed: int) -> None:
        self.rows = np.ascontiguousarray(rows)
        self.tokens, self.edits, self.changed = tokens, edits, changed
        self.rng = np.random.default_rng(seed)
        self.cursor = 0

    def versions(self, episode: int) -> Generator[tuple[Manifest, dict[str, Blob]], Manifest, None]:
        """Yields the drafts of one episode and their new payloads; each is answered by `send` of the sealed manifest."""
        ids = self.rng.integers(0, 49_152, self.tokens, dtype=np.int32)
        entries: list[ObjectEntry] = []
        extents: tuple[Extent, ...] = ()
        for number in range(self.edits + 1):
            start = int(self.rng.integers(0, self.tokens - self.changed + 1)) if number else 0
            fresh = Run(start, start + self.changed) if number else Run(0, self.tokens)
            ids[fresh.start : fresh.stop] = self.rng.integers(0, 49_152, fresh.stop - fresh.start, dtype=np.int32)
            kept = [e for run in complement([fresh], self.tokens) for e in overlap(extents, *run)]
            payloads = {}
            for at in range(fresh.start, fresh.stop, OBJECT_TOKENS):
                length = min(OBJECT_TOKENS, fresh.stop - at)
                entry = ObjectEntry(new_key(), length, at, number == 0)
                payloads[entry.key] = self._payload(length)
                kept.append(Extent(len(entries), 0, length, at, 0))
                entries.append(entry)
            extents = merge_extents(kept)
            used = sorted({extent.object_id for extent in extents})
            draft = Manifest.draft(
                fingerprint=FINGERPRINT,
                namespace="bench",
                version=f"{episode}.{number}",
                group=str(episode),
                parent=f"{episode}.{number - 1}" if number else None,
                token_ids=ids,
                extents=[StoredExtent(entries[e.object_id].key, *e[1:]) for e in extents],
                objects=[entries[at] for at in used],
            )
            sealed = yield draft, payloads
            for at, entry in zip(used, sealed.objects, strict=True):
                entries[at] = entry

    def _payload(self, length: int) -> Blob:
        at = np.arange(self.cursor, self.cursor + length) % len(self.rows)
        self.cursor += length
        payload: Blob = self.rows[at].reshape(-1)
        return payload


def _fill(store: KVStore, material: _Episodes, count: int) -> _Filled:
    """Saves all versions of `count` episodes; keeps some of their payloads to compare with."""
    out = _Filled()
    for episode in range(count):
        making = material.versions(episode)
        draft, payloads = next(making)
        while True:
            started = time.perf_counter()
            sealed = _save(store, draft, payloads)
            out.save_ms.append((time.perf_counter() - started) * 1e3)
            out.versions += 1
            out.distinct_bytes += sum(map(len, payloads.values()))
            if out.versions % 89 == 0:
                out.sample[draft.version] = payloads
            try:
                draft, payloads = making.send(sealed)
            except StopIteration:
                break
    return out


def _save(store: KVStore, draft: Manifest, payloads: dict[str, Blob]) -> Manifest:
    made: Manifest | Refused | str = store.prepare(draft, sum(map(len, payloads.values())))
    if isinstance(made, str):
        ticket = made
        for key, blob in payloads.items():
            put = store.put(ticket, key, 0, blob)
            if isinstance(put, Refused):
                raise RuntimeError(f"a save was refused: {put.reason}")
        made = store.complete(ticket)
    if not isinstance(made, Manifest):
        raise RuntimeError(f"a save was refused: {made}")
    return made


def _row(store: KVStore, made: _Filled, episodes: int, taken: int, open_s: float | None) -> TierBenchRow:
    """Reads a sample back, compares it, and returns the tier's figures."""
    find_ms, size, seconds = [], 0, 0.0
    for version, payloads in made.sample.items():
        started = time.perf_counter()
        manifest = store.find("bench", version)
        find_ms.append((time.perf_counter() - started) * 1e3)
        if not isinstance(manifest, Manifest):
            raise RuntimeError(f"version {version} is not found: {manifest}")
        started = time.perf_counter()
        got = store.fetch([entry.key for entry in manifest.objects], 0)
        seconds += time.perf_counter() - started
        for key, blob in got.items():
            if isinstance(blob, Lost) or (key in payloads and not np.array_equal(blob, payloads[key])):
                raise RuntimeError(f"object {key} of version {version} is not what was stored: {blob}")
            size += len(blob)
    [stats] = store.stats()
    return {
        "tier": store.tier,
        "paused_episodes": episodes,
        "versions": made.versions,
        "distinct_bytes": made.distinct_bytes,
        "bytes": taken,
        "accounted_bytes": stats["used_bytes"],
        "ratio": taken / made.distinct_bytes,
        "save_ms": statistics.median(made.save_ms),
        "open_s": open_s,
        "find_ms": statistics.median(find_ms) if find_ms else 0.0,
        "fetch_gb_s": size / seconds / 1e9 if seconds else 0.0,
    }


def _disk_bytes(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in (folder, *folder.rglob("*")))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
