"""The contract of a checkpoint store: two-phase saves, verified loads, and answers instead of exceptions.

```
scheduler   prepare(manifest, bytes) -> ticket ......................... complete(ticket) -> the sealed manifest
each rank                        put(ticket, key, rank, blob) ...
scheduler   find(namespace, version) -> manifest
each rank                                         fetch(keys, rank) -> blobs
```

A version cannot be found before `complete` returned, and then as a whole. A save that is not completed leaves nothing. The
processes need not share memory where `shared` says so: each opens the same URL.

`KVStore` counts, times and compares checksums once for all back ends; a back end implements the methods with an underscore.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import ClassVar, NamedTuple, Protocol, Self

import numpy as np

from agentcache.store.tiers.manifest import KEY, Manifest, fingerprint_fault, payload_checksum
from agentcache.store.tiers.outcomes import (
    Blob,
    BlobLike,
    GcReport,
    Lost,
    Miss,
    Refused,
    Stored,
    StoreStats,
    VerifyReport,
    VersionInfo,
)

__all__ = ["HINT_USES", "Claimed", "KVStore", "Observer", "Sizes"]

HINT_USES = 1024
"""What a hint of weight 1 is worth: the version is evicted as if it had been used that many uses of others later."""


class Observer(Protocol):
    """Whoever wants to know how long things took; see `agentcache.metrics`."""

    def saved(self, tier: str, seconds: float) -> None:
        """A save was completed, `seconds` after it was prepared."""

    def restored(self, tier: str, seconds: float, size_bytes: int) -> None:
        """Payloads were fetched and their checksums compared."""


class Claimed(NamedTuple):
    """A payload as a back end read it, and the checksum that it must have."""

    blob: Blob
    checksum: str


class Sizes(NamedTuple):
    """What a tier holds now; the part of `StoreStats` that is the back end's."""

    versions: int = 0
    objects: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    evictions: int = 0
    bytes_by_tag: Mapping[str, int] = {}


class KVStore(ABC):
    """A tier of checkpoints. Any thread may call; nothing is raised for what a disk, a server or another process did.

    Args:
        budget_bytes: Most bytes of payloads, manifests and reservations.
        fingerprint: What the engine's payloads are made for; None compares nothing (for tools).
        observer: Is told how long saves and restores took.
    """

    tier: ClassVar[str]
    durable: ClassVar[bool]
    """Whether versions survive the process."""
    shared: ClassVar[bool]
    """Whether other processes that open the same store take part in one save."""

    def __init__(
        self, budget_bytes: int, *, fingerprint: Mapping[str, str] | None = None, observer: Observer | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.fingerprint = None if fingerprint is None else dict(fingerprint)
        self._observer = observer
        self._counts_lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._started: dict[str, float] = {}

    # -- saving --------------------------------------------------------------------------------------------------------

    def prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        """Opens a save and makes room for it, by evicting whole versions when the budget asks for it.

        Args:
            manifest: From `Manifest.draft`. Objects that have parts must be stored already, in this namespace; they are
                kept until the save ends.
            reserve_bytes: Most bytes that the ranks will `put` together.

        Returns:
            The ticket of the save, or a refusal with nothing changed.
        """
        fault = self._foreign(manifest)
        if fault is not None:
            return self._refuse(Refused(fault, "foreign"))
        started = time.monotonic()
        made = self._prepare(manifest, reserve_bytes)
        if isinstance(made, Refused):
            return self._refuse(made)
        with self._counts_lock:
            self._started[made] = started
        return made

    def put(self, ticket: str, key: str, rank: int, blob: BlobLike) -> Stored | Refused:
        """Stores one rank's payload of a new object of an open save.

        Args:
            ticket: From `prepare`, in this or in another process.
            key: One of the manifest's `new_objects`.
            rank: In `[0, manifest.ranks)`.
            blob: Its bytes, contiguous. They must never change again: the store may keep them as they are.
        """
        data = _as_blob(blob)
        if not len(data) or not KEY.fullmatch(key):
            return self._refuse(Refused(f"object {key!r:.40} with {len(data)} bytes cannot be stored", "invalid"))
        checksum = payload_checksum(key, rank, data)
        fault = self._put(ticket, key, rank, data, checksum)
        return Stored(len(data), checksum) if fault is None else self._refuse(fault)

    def complete(self, ticket: str) -> Manifest | Refused:
        """Makes a version findable, all at once, when every rank has stored every new object.

        Returns:
            The manifest with all parts, for the objects that later versions share; or a refusal, and the save stays open.
        """
        made = self._complete(ticket)
        if isinstance(made, Refused):
            return self._refuse(made)
        with self._counts_lock:
            self._counts["saves"] += 1
            started = self._started.pop(ticket, None)
        if started is not None and self._observer is not None:
            self._observer.saved(self.tier, time.monotonic() - started)
        return made

    def abort(self, ticket: str) -> None:
        """Ends an open save and forgets what was put; one that is unknown is ignored."""
        with self._counts_lock:
            self._started.pop(ticket, None)
        self._abort(ticket)

    # -- loading -------------------------------------------------------------------------------------------------------

    def find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        """Returns a version's manifest, whole and made for this engine, and marks it as used."""
        found = self._find(namespace, version)
        if isinstance(found, Manifest):
            fault = self._foreign(found)
            if fault is not None:
                return self._refuse(Refused(fault, "foreign"))
            if (found.namespace, found.version) != (namespace, version):
                return self._refuse(Refused("another version's manifest stands in its place", "corrupt"))
            self._count("hits")
            return found
        if isinstance(found, Miss):
            self._count("misses")
            return found
        return self._refuse(found)

    def fetch(self, keys: Iterable[str], rank: int) -> dict[str, Blob | Lost]:
        """Returns one rank's payloads by key; each is what was put, or lost. The blobs must not be changed."""
        started = time.monotonic()
        wanted = dict.fromkeys(keys)
        read = self._fetch([key for key in wanted if KEY.fullmatch(key)], rank)
        out: dict[str, Blob | Lost] = {}
        size = 0
        for key in wanted:
            found = read.get(key)
            if found is None:
                found = Lost("it is not stored", "absent")
            elif isinstance(found, Claimed):
                if payload_checksum(key, rank, found.blob) == found.checksum:
                    out[key] = found.blob
                    size += len(found.blob)
                    continue
                found = Lost("its checksum does not match", "corrupt")
            out[key] = found
            with self._counts_lock:
                self._losses[found.kind] += 1
        if self._observer is not None:
            self._observer.restored(self.tier, time.monotonic() - started, size)
        return out

    def hint(self, namespace: str, version: str, weight: float = 1.0) -> bool:
        """Says how likely a resume is: 1 for an open pause, more for an announced resume, 0 when it is over.

        Returns:
            Whether the version is here. With a weight it is evicted later, as `HINT_USES` says.
        """
        return self._hint(namespace, version, max(0, round(weight * HINT_USES)))

    # -- keeping -------------------------------------------------------------------------------------------------------

    def delete(self, namespace: str, version: str) -> bool | Refused:
        """Removes a version and what only it used; returns whether it was there."""
        done = self._delete(namespace, version)
        return self._refuse(done) if isinstance(done, Refused) else done

    @abstractmethod
    def versions(self, namespace: str | None = None) -> tuple[VersionInfo, ...] | Refused:
        """Returns all versions, or those of one namespace, by creation."""

    @abstractmethod
    def holds(self, keys: Collection[str]) -> frozenset[str]:
        """Returns which of these objects completed versions point at; none when that cannot be told."""

    @abstractmethod
    def verify(self) -> VerifyReport | Refused:
        """Reads every manifest and every payload and compares all checksums; changes nothing."""

    @abstractmethod
    def gc(self) -> GcReport | Refused:
        """Clears away what crashes left behind: abandoned saves, damaged manifests, payloads that nothing points at."""

    def stats(self) -> tuple[StoreStats, ...]:
        """Returns the counters, one entry a tier, fastest first."""
        sizes = self._sizes()
        with self._counts_lock:
            return (
                {
                    "tier": self.tier,
                    "versions": sizes.versions,
                    "objects": sizes.objects,
                    "used_bytes": sizes.used_bytes,
                    "reserved_bytes": sizes.reserved_bytes,
                    "budget_bytes": self.budget_bytes,
                    "bytes_by_tag": dict(sizes.bytes_by_tag),
                    "hits": self._counts["hits"],
                    "misses": self._counts["misses"],
                    "saves": self._counts["saves"],
                    "evictions": sizes.evictions,
                    "refusals": dict(self._refusals),
                    "lost": dict(self._losses),
                },
            )

    def check_integrity(self) -> None:  # noqa: B027
        """Recomputes references and byte counts and compares; raises AssertionError."""

    def flush(self) -> None:  # noqa: B027
        """Returns when everything that was queued is done."""

    def close(self) -> None:  # noqa: B027
        """Ends open saves of this handle and gives back files, threads and connections; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what a back end implements ------------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused: ...

    @abstractmethod
    def _put(self, ticket: str, key: str, rank: int, blob: Blob, checksum: str) -> Refused | None: ...

    @abstractmethod
    def _complete(self, ticket: str) -> Manifest | Refused: ...

    @abstractmethod
    def _abort(self, ticket: str) -> None: ...

    @abstractmethod
    def _find(self, namespace: str, version: str) -> Manifest | Miss | Refused: ...

    @abstractmethod
    def _fetch(self, keys: Collection[str], rank: int) -> Mapping[str, Claimed | Lost]: ...

    @abstractmethod
    def _hint(self, namespace: str, version: str, uses: int) -> bool: ...

    @abstractmethod
    def _delete(self, namespace: str, version: str) -> bool | Refused: ...

    @abstractmethod
    def _sizes(self) -> Sizes: ...

    # -- inside --------------------------------------------------------------------------------------------------------

    def _foreign(self, manifest: Manifest) -> str | None:
        return None if self.fingerprint is None else fingerprint_fault(manifest.fingerprint, self.fingerprint)

    def _count(self, what: str) -> None:
        with self._counts_lock:
            self._counts[what] += 1

    def _refuse(self, refused: Refused) -> Refused:
        with self._counts_lock:
            self._refusals[refused.kind] += 1
        return refused


def _as_blob(data: BlobLike) -> Blob:
    """Returns the bytes of a contiguous buffer, not copied."""
    if isinstance(data, np.ndarray):
        assert data.flags.c_contiguous, "a payload is contiguous"
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, dtype=np.uint8)
