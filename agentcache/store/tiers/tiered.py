"""Memory over a durable tier: saves go to memory and are copied down, loads come from where the version is.

```
prepare, put, complete -> memory --copied, at once or in the background--> disk or Redis
find, fetch            <- memory, else <- disk or Redis
hint                      copies a version up, before its resume asks for it
```

A copy shares what the other tier holds already and stores the rest, so that each tier counts its own references. What the lower
tier refuses stays in memory, and is offered again after the next copy that succeeds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable
from typing import ClassVar, Literal

from agentcache.store.tiers.background import Background
from agentcache.store.tiers.base import KVStore, Observer
from agentcache.store.tiers.manifest import Manifest
from agentcache.store.tiers.memory import MemoryStore, Pin
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

__all__ = ["TieredStore", "copy_version"]

logger = logging.getLogger(__name__)
_CHUNK = 8  # payloads that a copy holds at a time
_UPPER, _LOWER = "upper:", "lower:"


def copy_version(manifest: Manifest, source: KVStore, target: KVStore) -> Manifest | Refused:
    """Saves a version of one store in another, sharing what that holds already; returns its manifest there."""
    here = target.holds([entry.key for entry in manifest.objects])
    objects = [e._replace(place="") if e.key in here else e._replace(place="", parts=()) for e in manifest.objects]
    new = [entry for entry in manifest.objects if entry.key not in here]
    ticket = target.prepare(manifest.with_objects(objects), sum(entry.size_bytes for entry in new))
    if isinstance(ticket, Refused):
        return ticket
    fault: Refused | None = None
    for rank in range(manifest.ranks):
        for at in range(0, len(new), _CHUNK):
            fault = fault or _copy_payloads([e.key for e in new[at : at + _CHUNK]], rank, source, target, ticket)
    made = fault or target.complete(ticket)
    if isinstance(made, Refused):
        target.abort(ticket)
    return made


def _copy_payloads(keys: list[str], rank: int, source: KVStore, target: KVStore, ticket: str) -> Refused | None:
    for key, blob in source.fetch(keys, rank).items():
        if isinstance(blob, Lost):
            return Refused(f"object {key} of rank {rank} cannot be copied: {blob.reason}", "unavailable")
        made = target.put(ticket, key, rank, blob)
        if isinstance(made, Refused):
            return made
    return None


class TieredStore(KVStore):
    """A memory tier over a durable one. One process, all ranks in it; other processes may open the lower tier.

    Args:
        upper: The memory tier; closed with this store.
        lower: The durable tier; closed with this store.
        mode: `through`: `complete` returns when the lower tier has the version, or has refused it. `behind`: it is copied in
            the background, and kept in memory until then.
        most_jobs: How many copies may wait. One that finds the queue full is offered again later.
        observer: Is told how long saves and restores took, copies apart.
    """

    tier: ClassVar[str] = "tiered"
    durable: ClassVar[bool] = True
    shared: ClassVar[bool] = False

    def __init__(
        self,
        upper: MemoryStore,
        lower: KVStore,
        *,
        mode: Literal["through", "behind"] = "behind",
        most_jobs: int = 64,
        observer: Observer | None = None,
    ) -> None:
        self.upper = upper
        self.lower = lower
        self.mode = mode
        self._observer = observer
        self._background = Background("agentcache-tiers", most_jobs)
        self._copying = threading.Lock()
        self._owed: dict[tuple[str, str], None] = {}  # versions that the lower tier could not take when it was asked
        self._started: dict[str, float] = {}

    # -- saving --------------------------------------------------------------------------------------------------------

    def prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        """See `KVStore`. What memory has no room for, or lacks objects of, goes to the lower tier at once."""
        started = time.monotonic()
        if self.lower.has(manifest.namespace, manifest.version):
            return Refused(f"version {manifest.version!r} exists already", "exists")
        above = self.upper.prepare(manifest, reserve_bytes)
        if isinstance(above, Refused) and above.kind not in ("full", "gone"):
            return above
        below = above if isinstance(above, str) else self.lower.prepare(manifest, reserve_bytes)
        if isinstance(below, Refused):
            assert isinstance(above, Refused)
            return Refused(f"{above.reason}; and below memory: {below.reason}", below.kind)
        ticket = (_UPPER if isinstance(above, str) else _LOWER) + below
        self._started[ticket] = started
        return ticket

    def put(self, ticket: str, key: str, rank: int, blob: BlobLike) -> Stored | Refused:
        """See `KVStore`."""
        tier, inner = self._route(ticket)
        return tier.put(inner, key, rank, blob)

    def complete(self, ticket: str) -> Manifest | Refused:
        """See `KVStore`."""
        tier, inner = self._route(ticket)
        if tier is self.upper:
            with self.upper.lock:  # nobody may evict it before it is pinned for the copy
                made = tier.complete(inner)
                pin = None if isinstance(made, Refused) else self.upper.pin(made.namespace, made.version)
            if pin is not None:
                self._send_down(pin)
        else:
            made = tier.complete(inner)
        if isinstance(made, Refused):
            return made
        started = self._started.pop(ticket, None)
        if started is not None and self._observer is not None:
            self._observer.saved(tier.tier, time.monotonic() - started)
        return made

    def abort(self, ticket: str) -> None:
        """See `KVStore`."""
        self._started.pop(ticket, None)
        tier, inner = self._route(ticket)
        tier.abort(inner)

    def _route(self, ticket: str) -> tuple[KVStore, str]:
        return (self.lower if ticket.startswith(_LOWER) else self.upper), ticket[len(_UPPER) :]

    # -- loading -------------------------------------------------------------------------------------------------------

    def find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        """See `KVStore`."""
        found = self.upper.find(namespace, version)
        return self.lower.find(namespace, version) if isinstance(found, Miss) else found

    def fetch(self, keys: Iterable[str], rank: int) -> dict[str, Blob | Lost]:
        """See `KVStore`. A payload that memory has lost is taken from below."""
        started = time.monotonic()
        out = self.upper.fetch(keys, rank)
        absent = [key for key, blob in out.items() if isinstance(blob, Lost)]
        if absent:
            out |= self.lower.fetch(absent, rank)
        if self._observer is not None:
            size = sum(len(blob) for blob in out.values() if not isinstance(blob, Lost))
            tier = self.lower if absent else self.upper
            self._observer.restored(tier.tier, time.monotonic() - started, size)
        return out

    def hint(self, namespace: str, version: str, weight: float = 1.0) -> bool:
        """See `KVStore`. A version that is only below is copied up in the background."""
        above = self.upper.hint(namespace, version, weight)
        below = self.lower.hint(namespace, version, weight)
        if below and not above and weight > 0:
            self._background.submit(lambda: self._copy_up(namespace, version, weight))
        return above or below

    # -- copies --------------------------------------------------------------------------------------------------------

    def _send_down(self, pin: Pin) -> None:
        if self.mode == "through":
            self._copy_down(pin)
        elif not self._background.submit(lambda: self._copy_down(pin)):
            self.upper.unpin(pin)
            self._owed[pin.manifest.namespace, pin.manifest.version] = None

    def _copy_down(self, pin: Pin) -> None:
        manifest = pin.manifest
        with self._copying:  # `delete` waits, so that no copy brings back what it removed
            made = copy_version(manifest, self.upper, self.lower) if self.upper.is_here(pin) else Miss()
        self.upper.unpin(pin)
        if isinstance(made, Refused):
            logger.warning("version %r stays in memory only: %s", manifest.version, made.reason)
            if made.kind == "unavailable":
                self._owed[manifest.namespace, manifest.version] = None
        elif self._owed:
            self._background.submit(self._pay_back)

    def _pay_back(self) -> None:
        """Offers again what the lower tier could not take, until it refuses once more."""
        for namespace, version in [*self._owed]:
            pin = self.upper.pin(namespace, version)
            if pin is not None:
                with self._copying:
                    made = copy_version(pin.manifest, self.upper, self.lower) if self.upper.is_here(pin) else Miss()
                self.upper.unpin(pin)
                if isinstance(made, Refused) and made.kind == "unavailable":
                    return
            self._owed.pop((namespace, version), None)

    def _copy_up(self, namespace: str, version: str, weight: float) -> None:
        with self._copying:
            found = self.lower.find(namespace, version)
            if isinstance(found, Manifest) and not self.upper.has(namespace, version):
                made = copy_version(found, self.lower, self.upper)
                if isinstance(made, Refused):
                    logger.info("version %r is not brought into memory: %s", version, made.reason)
                self.upper.hint(namespace, version, weight)

    # -- keeping -------------------------------------------------------------------------------------------------------

    def delete(self, namespace: str, version: str) -> bool | Refused:
        """See `KVStore`."""
        with self._copying:
            above = self.upper.delete(namespace, version)
            below = self.lower.delete(namespace, version)
        return below if isinstance(below, Refused) else below or above is True

    def versions(self, namespace: str | None = None) -> tuple[VersionInfo, ...] | Refused:
        """See `KVStore`. Those that are only in memory come last."""
        above, below = self.upper.versions(namespace), self.lower.versions(namespace)
        if isinstance(above, Refused) or isinstance(below, Refused):
            return below if isinstance(below, Refused) else above
        known = {(info.namespace, info.version) for info in below}
        return (*below, *(info for info in above if (info.namespace, info.version) not in known))

    def has(self, namespace: str, version: str) -> bool:
        """See `KVStore`."""
        return self.upper.has(namespace, version) or self.lower.has(namespace, version)

    def holds(self, keys: Collection[str]) -> frozenset[str]:
        """See `KVStore`."""
        return self.upper.holds(keys) | self.lower.holds(keys)

    def verify(self) -> VerifyReport | Refused:
        """See `KVStore`; counts each tier's copies."""
        above, below = self.upper.verify(), self.lower.verify()
        if isinstance(above, Refused) or isinstance(below, Refused):
            return below if isinstance(below, Refused) else above
        return VerifyReport(
            above.versions + below.versions,
            above.objects + below.objects,
            above.payload_bytes + below.payload_bytes,
            tuple(f"{self.upper.tier}: {f}" for f in above.faults)
            + tuple(f"{self.lower.tier}: {f}" for f in below.faults),
        )

    def gc(self) -> GcReport | Refused:
        """See `KVStore`."""
        return self.lower.gc()

    def stats(self) -> tuple[StoreStats, ...]:
        """See `KVStore`."""
        return *self.upper.stats(), *self.lower.stats()

    def check_integrity(self) -> None:
        """See `KVStore`."""
        self.flush()
        self.upper.check_integrity()
        self.lower.check_integrity()

    def flush(self) -> None:
        """See `KVStore`."""
        self._background.flush()
        self.lower.flush()

    def close(self) -> None:
        """See `KVStore`. What is queued is copied first."""
        self._background.close()
        self.upper.close()
        self.lower.close()
