"""The memory tier: payloads and manifests of one process, within a byte budget."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from agentcache.store.tiers.base import Observer
from agentcache.store.tiers.ledger import Holder, Ledger, inherited_fault
from agentcache.store.tiers.manifest import Manifest, Part, payload_checksum, version_name
from agentcache.store.tiers.outcomes import Blob, GcReport, Lost, Miss, Refused, VerifyReport, VersionInfo
from agentcache.store.tiers.tier import Claimed, Sizes, Tier

__all__ = ["MemoryStore", "Pin"]


@dataclass(slots=True, eq=False)
class _Save:
    manifest: Manifest
    room_bytes: int
    wanted: frozenset[str]
    put: dict[tuple[str, int], tuple[Blob, Part]] = field(default_factory=dict)


class Pin(NamedTuple):
    """A version that is kept for a while; see `MemoryStore.pin`."""

    manifest: Manifest
    holder: Holder


class MemoryStore(Tier):
    """Keeps blobs as they are put. One process, all ranks in it; nothing survives it.

    Args:
        budget_bytes: Most bytes of payloads, manifests and reservations.
        policy: Name of the eviction policy, see `ledger.POLICIES`.
        fingerprint: See `Tier`.
        observer: See `Tier`.

    Raises:
        ConfigError: The policy is unknown.
    """

    tier: ClassVar[str] = "memory"
    durable: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    def __init__(
        self,
        budget_bytes: int,
        *,
        policy: str = "lru",
        fingerprint: Mapping[str, str] | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(budget_bytes, fingerprint=fingerprint, observer=observer)
        self.lock = threading.RLock()
        """Held by whoever must see one state over several calls."""
        self._ledger = Ledger(policy)
        self._saves: dict[str, _Save] = {}
        self._blobs: dict[tuple[str, int], Blob] = {}
        self._clock = 0
        self._evictions = 0

    def _prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        with self.lock:
            if manifest.name in self._ledger.holders:
                return Refused(f"version {manifest.version!r} exists already", "exists")
            fault = inherited_fault(manifest, self._ledger.records)
            if fault is not None:
                return fault
            inherited = [entry for entry in manifest.objects if entry.parts]
            ticket = f"memory-{secrets.token_hex(8)}"
            holder = Holder(
                ticket,
                manifest.namespace,
                manifest.cost_bytes + reserve_bytes,
                tuple(entry.key for entry in inherited),
                pins=1,
            )
            # Added first, so that what it shares is not evicted to make room for it.
            self._ledger.add(holder, inherited)
            refused = self._make_room(0)
            if refused is not None:
                self._ledger.remove(ticket)
                return refused
            self._saves[ticket] = _Save(manifest, reserve_bytes, frozenset(e.key for e in manifest.new_objects))
            return ticket

    def _put(self, ticket: str, key: str, rank: int, blob: Blob, checksum: str) -> Refused | None:
        with self.lock:
            save = self._saves.get(ticket)
            if save is None:
                return Refused("there is no such open save", "invalid")
            if not 0 <= rank < save.manifest.ranks or key not in save.wanted:
                return Refused(f"object {key} of rank {rank} is none that this save stores", "invalid")
            part = Part(len(blob), checksum)
            old = save.put.get((key, rank))
            if old is not None:
                return None if old[1] == part else Refused(f"object {key} was stored with other bytes", "invalid")
            if len(blob) > save.room_bytes:
                return Refused(f"{len(blob)} bytes are more than the save has reserved", "full")
            save.room_bytes -= len(blob)
            save.put[key, rank] = blob, part
            return None

    def _complete(self, ticket: str) -> Manifest | Refused:
        with self.lock:
            save = self._saves.get(ticket)
            if save is None:
                return Refused("there is no such open save", "invalid")
            manifest = save.manifest
            if manifest.name in self._ledger.holders:
                return Refused(f"version {manifest.version!r} exists already", "exists")
            ranks = range(manifest.ranks)
            missing = [(e.key, rank) for e in manifest.new_objects for rank in ranks if (e.key, rank) not in save.put]
            if missing:
                return Refused(f"{len(missing)} payloads are not stored yet: {missing[0]}", "invalid")
            if any(entry.key in self._ledger.records for entry in manifest.new_objects):
                return Refused("another save stored an object of the same key", "invalid")
            sealed = manifest.with_objects(
                (
                    entry if entry.parts else entry._replace(parts=tuple(save.put[entry.key, r][1] for r in ranks))
                    for entry in manifest.objects
                ),
                sequence=self._tick(),
            )
            self._blobs.update({at: blob for at, (blob, _) in save.put.items()})
            keys = tuple(entry.key for entry in sealed.objects)
            holder = Holder(
                sealed.name, sealed.namespace, sealed.cost_bytes, keys, sealed.sequence, sealed.sequence, what=sealed
            )
            del self._saves[ticket]
            self._ledger.add(holder, sealed.objects)
            self._remove(ticket)
            return sealed

    def _abort(self, ticket: str) -> None:
        with self.lock:
            if self._saves.pop(ticket, None) is not None:
                self._remove(ticket)

    def _find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        with self.lock:
            holder = self._ledger.holders.get(version_name(namespace, version))
            if holder is None:
                return Miss()
            holder.score = max(holder.score, self._tick())
            found: Manifest = holder.what
            return found

    def _fetch(self, keys: Collection[str], rank: int) -> Mapping[str, Claimed | Lost]:
        out: dict[str, Claimed | Lost] = {}
        with self.lock:
            for key in keys:
                blob, record = self._blobs.get((key, rank)), self._ledger.records.get(key)
                if blob is not None and record is not None:
                    out[key] = Claimed(blob, record.entry.parts[rank].checksum)
        return out

    def _hint(self, namespace: str, version: str, uses: int) -> bool:
        with self.lock:
            holder = self._ledger.holders.get(version_name(namespace, version))
            if holder is not None:
                holder.score = self._tick() + uses
            return holder is not None

    def _delete(self, namespace: str, version: str) -> bool | Refused:
        with self.lock:
            name = version_name(namespace, version)
            if name not in self._ledger.holders:
                return False
            self._remove(name)
            return True

    def pin(self, namespace: str, version: str) -> Pin | None:
        """Keeps a version from eviction until `unpin`, though not from `delete`; None when it is not here."""
        with self.lock:
            holder = self._ledger.holders.get(version_name(namespace, version))
            if holder is None:
                return None
            self._ledger.pin(holder)
            return Pin(holder.what, holder)

    def unpin(self, pin: Pin) -> None:
        """Takes back a pin."""
        with self.lock:
            if self.is_here(pin):
                self._ledger.unpin(pin.holder)

    def is_here(self, pin: Pin) -> bool:
        """Whether a pinned version was not deleted."""
        with self.lock:
            return self._ledger.holders.get(pin.holder.name) is pin.holder

    def versions(self, namespace: str | None = None) -> tuple[VersionInfo, ...] | Refused:
        """See `KVStore`."""
        with self.lock:
            found = [h.what.info() for h in self._ledger.holders.values() if isinstance(h.what, Manifest)]
        wanted = [info for info in found if namespace is None or info.namespace == namespace]
        return tuple(sorted(wanted, key=lambda info: info.sequence))

    def has(self, namespace: str, version: str) -> bool:
        """See `KVStore`."""
        with self.lock:
            return version_name(namespace, version) in self._ledger.holders

    def holds(self, keys: Collection[str]) -> frozenset[str]:
        """See `KVStore`."""
        with self.lock:
            return frozenset(key for key in keys if key in self._ledger.records)

    def verify(self) -> VerifyReport | Refused:
        """See `KVStore`."""
        with self.lock:
            versions = sum(isinstance(holder.what, Manifest) for holder in self._ledger.holders.values())
            records = {key: record.entry for key, record in self._ledger.records.items()}
            blobs = dict(self._blobs)
        bad = [
            f"object {key} of rank {rank}: its checksum does not match"
            for (key, rank), blob in blobs.items()
            if payload_checksum(key, rank, blob) != records[key].parts[rank].checksum
        ]
        return VerifyReport(versions, len(records), sum(len(blob) for blob in blobs.values()), tuple(bad))

    def gc(self) -> GcReport | Refused:
        """Returns an empty report: a process that ends leaves nothing in memory."""
        return GcReport()

    def check_integrity(self) -> None:
        """See `KVStore`."""
        with self.lock:
            self._ledger.check_integrity()
            expected = {(k, rank) for k, r in self._ledger.records.items() for rank in range(len(r.entry.parts))}
            assert expected == set(self._blobs), "payloads and records differ"
            assert self._ledger.used_bytes <= self.budget_bytes, "over budget"
            assert {h.name for h in self._ledger.holders.values() if h.what is None} == set(self._saves)

    def close(self) -> None:
        """Forgets everything."""
        with self.lock:
            for name in [*self._ledger.holders]:
                self._remove(name)
            self._saves.clear()

    def _sizes(self) -> Sizes:
        with self.lock:
            reserved = sum(h.own_bytes for h in self._ledger.holders.values() if h.what is None)
            versions = len(self._ledger.holders) - len(self._saves)
            tags = dict(self._ledger.bytes_by_tag)
            objects = len(self._ledger.records)
            return Sizes(versions, objects, self._ledger.used_bytes, reserved, self._evictions, tags)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _make_room(self, needed: int) -> Refused | None:
        victims = self._ledger.victims(needed, self.budget_bytes)
        if isinstance(victims, Refused):
            return victims
        for victim in victims:
            self._remove(victim.name)
        self._evictions += len(victims)
        return None

    def _remove(self, name: str) -> None:
        for entry in self._ledger.remove(name):
            for rank in range(len(entry.parts)):
                del self._blobs[entry.key, rank]
