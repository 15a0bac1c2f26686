"""One tier: what all back ends have in common. They implement the methods with an underscore.

Refusals, hits and losses are counted here, checksums compared and fingerprints checked, so that no back end can forget to.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from agentcache.store.tiers.base import HINT_USES, KVStore, Observer
from agentcache.store.tiers.manifest import KEY, Manifest, fingerprint_fault, payload_checksum
from agentcache.store.tiers.outcomes import Blob, BlobLike, Lost, Miss, Refused, Stored, StoreStats

__all__ = ["Claimed", "Sizes", "Tier"]


_MOST_WEIGHT = 1000.0


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


class Tier(KVStore):
    """A store of one tier.

    Args:
        budget_bytes: Most bytes of payloads, manifests and reservations.
        fingerprint: What the engine's payloads are made for; None compares nothing (for tools).
        observer: Is told how long saves and restores took.
    """

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

    def prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        """See `KVStore`."""
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
        """See `KVStore`."""
        data = _as_blob(blob)
        if not len(data) or not KEY.fullmatch(key):
            return self._refuse(Refused(f"object {key!r:.40} with {len(data)} bytes cannot be stored", "invalid"))
        checksum = payload_checksum(key, rank, data)
        fault = self._put(ticket, key, rank, data, checksum)
        return Stored(len(data), checksum) if fault is None else self._refuse(fault)

    def complete(self, ticket: str) -> Manifest | Refused:
        """See `KVStore`."""
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
        """See `KVStore`."""
        with self._counts_lock:
            self._started.pop(ticket, None)
        self._abort(ticket)

    def find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        """See `KVStore`."""
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
        """See `KVStore`."""
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
        """See `KVStore`."""
        return self._hint(namespace, version, round(min(max(0.0, weight), _MOST_WEIGHT) * HINT_USES))

    def delete(self, namespace: str, version: str) -> bool | Refused:
        """See `KVStore`."""
        done = self._delete(namespace, version)
        return self._refuse(done) if isinstance(done, Refused) else done

    def stats(self) -> tuple[StoreStats, ...]:
        """See `KVStore`."""
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

    # -- what a back end implements ------------------------------------------------------------------------------------
    # As the method of `KVStore` without the underscore, but for what is said here.

    @abstractmethod
    def _prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        """The manifest is this engine's."""

    @abstractmethod
    def _put(self, ticket: str, key: str, rank: int, blob: Blob, checksum: str) -> Refused | None:
        """Stores a payload, which is not empty, and its checksum; None when that is done. A second time is no fault."""

    @abstractmethod
    def _complete(self, ticket: str) -> Manifest | Refused: ...

    @abstractmethod
    def _abort(self, ticket: str) -> None: ...

    @abstractmethod
    def _find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        """Whose the manifest is and which engine's is checked by the caller."""

    @abstractmethod
    def _fetch(self, keys: Collection[str], rank: int) -> Mapping[str, Claimed | Lost]:
        """Keys that are not stored may be left out. The caller compares the checksums, which come from the manifests."""

    @abstractmethod
    def _hint(self, namespace: str, version: str, uses: int) -> bool:
        """Makes a version as old as if it were used that many uses from now."""

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
