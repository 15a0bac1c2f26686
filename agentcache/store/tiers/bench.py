"""What many paused episodes take: bytes in a store against the bytes of their distinct tokens. No engine, no torch.

The payloads are somebody else's: rows of an array, or those that an engine has left in a store (`stored_payloads`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from agentcache.errors import ConfigError
from agentcache.store.extents import OBJECT_TOKENS, Extent, merge_extents, overlap
from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, StoredExtent, new_key
from agentcache.store.tiers.memory import MemoryStore
from agentcache.store.tiers.outcomes import Blob, Lost, Refused
from agentcache.types import Run, complement

__all__ = [
    "EpisodeShape",
    "Filled",
    "Payloads",
    "ReadBack",
    "bench_memory",
    "disk_bytes",
    "fill_store",
    "pooled",
    "read_back",
    "rows_as_payloads",
    "stored_payloads",
]

Payloads = Callable[[int], Blob]
"""Returns the bytes of a new object of that many tokens: a fresh copy, which a store may keep."""

_NAMESPACE = "bench"
_SAMPLED = 89  # every so many versions are read back and compared


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """A paused episode: a first version and its edits, each a child of the one before.

    Attributes:
        tokens: Of every version.
        edits: Versions after the first.
        changed: Tokens that each of them replaces, somewhere.
    """

    tokens: int = 512
    edits: int = 10
    changed: int = 32

    @property
    def distinct_tokens(self) -> int:
        """Tokens of an episode, those that its versions share counted once."""
        return self.tokens + self.edits * self.changed

    @property
    def object_tokens(self) -> tuple[int, ...]:
        """The sizes of its objects, in tokens, each once."""
        runs = [Run(0, self.tokens), *([Run(0, self.changed)] if self.edits else [])]
        return tuple(sorted({stop - start for run in runs for start, stop in _cut(run)}))


@dataclass(slots=True)
class Filled:
    """What was saved: how much, how fast, and a sample of it to compare with."""

    versions: int = 0
    save_ms: list[float] = field(default_factory=list)
    sample: dict[str, dict[str, Blob]] = field(default_factory=dict)


class ReadBack(TypedDict):
    """How fast a sample was found and read; all of it was what had been stored."""

    versions: int
    find_ms: float
    fetch_gb_s: float


# -- payloads ----------------------------------------------------------------------------------------------------------


def rows_as_payloads(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> Payloads:
    """Returns payloads of an array's rows `[N, bytes]`, one after the other, in a circle."""
    cursor = 0

    def take(tokens: int) -> Blob:
        nonlocal cursor
        at = np.arange(cursor, cursor + tokens) % len(rows)
        cursor += tokens
        out: Blob = rows[at].reshape(-1)
        return out

    return take


def pooled(pool: Mapping[int, Sequence[Blob]]) -> Payloads:
    """Returns copies of the payloads of a pool by their size in tokens, each size in a circle."""
    circles = {tokens: cycle(blobs) for tokens, blobs in pool.items()}
    return lambda tokens: next(circles[tokens]).copy()


def stored_payloads(
    store: KVStore, namespace: str, versions: Iterable[str], shape: EpisodeShape, tag: str
) -> dict[int, list[Blob]]:
    """Returns the payloads of versions that an engine has stored, by their size in tokens: what episodes can be made of.

    Args:
        store: Where they are.
        namespace: Of the versions.
        versions: Which.
        shape: What is to be made of them; payloads of other sizes are left out.
        tag: Precision of those that are wanted.

    Raises:
        ConfigError: A version is not there, or there is no payload of a size that the shape needs.
    """
    entries: dict[str, ObjectEntry] = {}
    for version in versions:
        found = store.find(namespace, version)
        if not isinstance(found, Manifest):
            raise ConfigError(f"version {version!r} is not in the store: {found}")
        entries |= {e.key: e for e in found.objects if e.tag == tag and e.tokens in shape.object_tokens}
    pool: dict[int, list[Blob]] = {tokens: [] for tokens in shape.object_tokens}
    for key, blob in store.fetch(entries, 0).items():
        if not isinstance(blob, Lost):
            pool[entries[key].tokens].append(blob)
    missing = [tokens for tokens, blobs in pool.items() if not blobs]
    if missing:
        raise ConfigError(f"the stored versions have no {tag} object of {missing} tokens to make episodes of")
    return pool


# -- episodes ----------------------------------------------------------------------------------------------------------


def fill_store(
    store: KVStore,
    payloads: Payloads,
    shape: EpisodeShape,
    episodes: int,
    *,
    fingerprint: Mapping[str, str],
    tag: str = "exact",
    seed: int = 0,
    progress: Callable[[int], object] = lambda _: None,
) -> Filled:
    """Saves all versions of `episodes` paused episodes; keeps some of their payloads to compare with.

    Args:
        store: Any tier.
        payloads: Bytes of their objects, of one rank.
        shape: Of each episode.
        episodes: How many.
        fingerprint: Of the engine that the payloads are from.
        tag: Precision of the payloads.
        seed: Of the edits' places.
        progress: Is told how many episodes are saved.

    Raises:
        RuntimeError: A save was refused.
    """
    out, rng = Filled(), np.random.default_rng(seed)
    for episode in range(episodes):
        making = _versions(f"{seed}.{episode}", payloads, shape, rng, fingerprint, tag)
        draft, blobs = next(making)
        while True:
            started = time.perf_counter()
            sealed = _save(store, draft, blobs)
            out.save_ms.append((time.perf_counter() - started) * 1e3)
            if out.versions % _SAMPLED == 0:
                out.sample[draft.version] = blobs
            out.versions += 1
            try:
                draft, blobs = making.send(sealed)
            except StopIteration:
                break
        progress(episode + 1)
    return out


def _versions(
    episode: str,
    payloads: Payloads,
    shape: EpisodeShape,
    rng: np.random.Generator,
    fingerprint: Mapping[str, str],
    tag: str,
) -> Generator[tuple[Manifest, dict[str, Blob]], Manifest, None]:
    """Yields the drafts of one episode and their new payloads; each is answered by `send` of the sealed manifest."""
    ids = rng.integers(0, 49_152, shape.tokens, dtype=np.int32)
    entries: list[ObjectEntry] = []
    extents: tuple[Extent, ...] = ()
    for number in range(shape.edits + 1):
        start = int(rng.integers(0, shape.tokens - shape.changed + 1)) if number else 0
        fresh = Run(start, start + shape.changed) if number else Run(0, shape.tokens)
        ids[fresh.start : fresh.stop] = rng.integers(0, 49_152, fresh.stop - fresh.start, dtype=np.int32)
        kept = [e for run in complement([fresh], shape.tokens) for e in overlap(extents, *run)]
        blobs = {}
        for at, stop in _cut(fresh):
            entry = ObjectEntry(new_key(), stop - at, at, number == 0, tag)
            blobs[entry.key] = payloads(stop - at)
            kept.append(Extent(len(entries), 0, stop - at, at, 0))
            entries.append(entry)
        extents = merge_extents(kept)
        used = sorted({extent.object_id for extent in extents})
        draft = Manifest.draft(
            fingerprint=fingerprint,
            namespace=_NAMESPACE,
            version=f"{episode}.{number}",
            group=episode,
            parent=f"{episode}.{number - 1}" if number else None,
            token_ids=ids,
            extents=[StoredExtent(entries[e.object_id].key, *e[1:]) for e in extents],
            objects=[entries[at] for at in used],
        )
        sealed = yield draft, blobs
        for at, entry in zip(used, sealed.objects, strict=True):
            entries[at] = entry


def _cut(run: Run) -> list[Run]:
    return [Run(at, min(at + OBJECT_TOKENS, run.stop)) for at in range(run.start, run.stop, OBJECT_TOKENS)]


def _save(store: KVStore, draft: Manifest, blobs: Mapping[str, Blob]) -> Manifest:
    made: Manifest | Refused | str = store.prepare(draft, sum(map(len, blobs.values())))
    if isinstance(made, str):
        ticket = made
        for key, blob in blobs.items():
            put = store.put(ticket, key, 0, blob)
            if isinstance(put, Refused):
                raise RuntimeError(f"a save was refused: {put.reason}")
        made = store.complete(ticket)
    if not isinstance(made, Manifest):
        raise RuntimeError(f"a save was refused: {made}")
    return made


def read_back(store: KVStore, sample: Mapping[str, Mapping[str, Blob]]) -> ReadBack:
    """Returns how fast a sample of `fill_store` is found and read.

    Raises:
        RuntimeError: Something is not found, or not what was stored.
    """
    find_ms, size, seconds = [], 0, 0.0
    for version, blobs in sample.items():
        started = time.perf_counter()
        manifest = store.find(_NAMESPACE, version)
        find_ms.append((time.perf_counter() - started) * 1e3)
        if not isinstance(manifest, Manifest):
            raise RuntimeError(f"version {version} is not found: {manifest}")
        started = time.perf_counter()
        got = store.fetch([entry.key for entry in manifest.objects], 0)
        seconds += time.perf_counter() - started
        for key, blob in got.items():
            if isinstance(blob, Lost) or (key in blobs and not np.array_equal(blob, blobs[key])):
                raise RuntimeError(f"object {key} of version {version} is not what was stored: {blob}")
            size += len(blob)
    return {
        "versions": len(sample),
        "find_ms": statistics.median(find_ms) if find_ms else 0.0,
        "fetch_gb_s": size / seconds / 1e9 if seconds else 0.0,
    }


# -- what they take ----------------------------------------------------------------------------------------------------


def bench_memory(
    payloads: Payloads,
    shape: EpisodeShape,
    episodes: int,
    *,
    tag: str = "exact",
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, float]:
    """Returns what paused episodes take in the memory tier.

    Run it in a fresh process: pages that were freed before would be used again unseen.

    Returns:
        `bytes` (resident pages of this process), `accounted_bytes` (what the budget counts), `versions`, the medians `save_ms`
        and `find_ms`.
    """
    fingerprint = {"model": "bench"}
    before = _resident_bytes()
    with MemoryStore(1 << 62, fingerprint=fingerprint) as memory:
        made = fill_store(memory, payloads, shape, episodes, fingerprint=fingerprint, tag=tag, progress=progress)
        taken = _resident_bytes() - before
        read = read_back(memory, made.sample)
        [stats] = memory.stats()
    return {
        "bytes": taken,
        "accounted_bytes": stats["used_bytes"],
        "versions": made.versions,
        "save_ms": statistics.median(made.save_ms),
        "find_ms": read["find_ms"],
    }


def disk_bytes(folder: Path) -> int:
    """Returns what a folder takes of its disk: the blocks of all its files, its own and its subfolders'."""
    return sum(512 * path.stat().st_blocks for path in (folder, *folder.rglob("*")))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
