"""The bookkeeping of one store: who keeps which objects, what that takes, and who goes when room is needed. No I/O.

Objects are kept by holders: versions, and open saves for as long as they last. An object goes with its last holder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from agentcache.errors import ConfigError
from agentcache.store.tiers.manifest import Manifest, ObjectEntry
from agentcache.store.tiers.outcomes import Refused

__all__ = ["POLICIES", "Holder", "Ledger", "Record", "check_policy_name", "inherited_fault"]


@dataclass(slots=True, eq=False)
class Holder:
    """A version, or an open save.

    Attributes:
        name: Unique in its ledger.
        namespace: Tenant.
        own_bytes: What it takes beside its objects: the manifest, and an open save's reservation.
        keys: The objects that it keeps.
        sequence: Order of creation.
        score: Last use, raised by hints; the lowest is evicted first.
        pins: Open saves, and copies to another tier. A pinned holder is not evicted.
        what: Whatever the store wants to find here.
    """

    name: str
    namespace: str
    own_bytes: int
    keys: tuple[str, ...]
    sequence: int = 0
    score: int = 0
    pins: int = 0
    what: Any = None


@dataclass(slots=True, eq=False)
class Record:
    """A stored object.

    Attributes:
        entry: With its parts.
        namespace: Only this tenant's versions may point at it.
        holders: How many do.
        pinned: How many of them are pinned.
    """

    entry: ObjectEntry
    namespace: str
    holders: int = 0
    pinned: int = 0


POLICIES: dict[str, Callable[[Holder], tuple[int, ...]]] = {
    "lru": lambda holder: (holder.score, holder.sequence),
    "fifo": lambda holder: (holder.sequence,),
}
"""Eviction policies by name: `lru` is least recently used, weighted by expected resume; `fifo` is oldest, a baseline."""


def check_policy_name(policy: str) -> None:
    """Raises ConfigError for a name that is no eviction policy."""
    if policy not in POLICIES:
        raise ConfigError(f"unknown eviction policy {policy!r}; known: {', '.join(POLICIES)}")


@dataclass(slots=True)
class Ledger:
    """Holders, their objects and the sums.

    `pinned_bytes` is what no eviction can free. A request for room is granted exactly when `pinned + needed` is in the
    budget, so that the answer is known before anything changes.
    """

    policy: str = "lru"
    holders: dict[str, Holder] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    used_bytes: int = 0
    pinned_bytes: int = 0
    bytes_by_tag: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        check_policy_name(self.policy)

    def add(self, holder: Holder, entries: Iterable[ObjectEntry]) -> list[ObjectEntry]:
        """Adds a holder of these objects; returns those that were not here before."""
        assert holder.name not in self.holders, f"{holder.name} is here already"
        fresh = []
        for entry in entries:
            record = self.records.get(entry.key)
            if record is None:
                record = self.records[entry.key] = Record(entry, holder.namespace)
                self.used_bytes += entry.size_bytes
                self.bytes_by_tag[entry.tag] += entry.size_bytes
                fresh.append(entry)
            record.holders += 1
        self.holders[holder.name] = holder
        self.used_bytes += holder.own_bytes
        pins, holder.pins = holder.pins, 0
        for _ in range(pins):
            self.pin(holder)
        return fresh

    def remove(self, name: str) -> list[ObjectEntry]:
        """Removes a holder, whatever its pins; returns the objects that went with it."""
        holder = self.holders[name]
        while holder.pins:
            self.unpin(holder)
        del self.holders[name]
        self.used_bytes -= holder.own_bytes
        gone = []
        for key in holder.keys:
            record = self.records[key]
            record.holders -= 1
            if not record.holders:
                del self.records[key]
                self.used_bytes -= record.entry.size_bytes
                self.bytes_by_tag[record.entry.tag] -= record.entry.size_bytes
                if not self.bytes_by_tag[record.entry.tag]:
                    del self.bytes_by_tag[record.entry.tag]
                gone.append(record.entry)
        return gone

    def pin(self, holder: Holder) -> None:
        """Keeps a holder from eviction until `unpin`; pins count."""
        holder.pins += 1
        if holder.pins == 1:
            self.pinned_bytes += holder.own_bytes
            for key in holder.keys:
                record = self.records[key]
                record.pinned += 1
                if record.pinned == 1:
                    self.pinned_bytes += record.entry.size_bytes

    def unpin(self, holder: Holder) -> None:
        """Takes back one pin."""
        assert holder.pins > 0, f"{holder.name} is not pinned"
        holder.pins -= 1
        if holder.pins == 0:
            self.pinned_bytes -= holder.own_bytes
            for key in holder.keys:
                record = self.records[key]
                record.pinned -= 1
                if record.pinned == 0:
                    self.pinned_bytes -= record.entry.size_bytes

    def victims(
        self, needed: int, budget: int, rescore: Callable[[Holder], int] | None = None
    ) -> list[Holder] | Refused:
        """Returns which holders must go, in order, so that `needed` more bytes fit; or a refusal. Changes only scores.

        Args:
            needed: Bytes to come.
            budget: Most bytes after that.
            rescore: Tells a holder's latest score, when others may have changed it.
        """
        if self.pinned_bytes + needed > budget:
            return Refused(
                f"{needed} bytes do not fit into the store: open saves use {self.pinned_bytes} of {budget}", "full"
            )
        if self.used_bytes + needed <= budget:
            return []
        rank = POLICIES[self.policy]
        queue = [(rank(holder), holder.name) for holder in self.holders.values() if not holder.pins]
        heapify(queue)
        out: list[Holder] = []
        left: Counter[str] = Counter()
        used = self.used_bytes
        while used + needed > budget:
            key, name = heappop(queue)
            holder = self.holders[name]
            if rescore is not None:
                holder.score = rescore(holder)
                if rank(holder) > key:
                    heappush(queue, (rank(holder), name))
                    continue
            out.append(holder)
            used -= holder.own_bytes
            for object_key in holder.keys:
                left[object_key] += 1
                record = self.records[object_key]
                if left[object_key] == record.holders:
                    used -= record.entry.size_bytes
        return out

    def check_integrity(self) -> None:
        """Recomputes everything from the holders and compares; raises AssertionError."""
        holders, pinned = Counter[str](), Counter[str]()
        used = sum(holder.own_bytes for holder in self.holders.values())
        kept = sum(holder.own_bytes for holder in self.holders.values() if holder.pins)
        tags: Counter[str] = Counter()
        for holder in self.holders.values():
            assert len(set(holder.keys)) == len(holder.keys), holder.name
            holders.update(holder.keys)
            if holder.pins:
                pinned.update(holder.keys)
            for key in holder.keys:
                assert self.records[key].namespace == holder.namespace, "an object is shared by two tenants"
        assert holders == {key: record.holders for key, record in self.records.items()}, "wrong references"
        for key, record in self.records.items():
            size = record.entry.size_bytes
            assert record.pinned == pinned[key], key
            used += size
            tags[record.entry.tag] += size
            kept += size if record.pinned else 0
        assert (self.used_bytes, self.pinned_bytes, self.bytes_by_tag) == (used, kept, tags), "wrong sums"


def inherited_fault(manifest: Manifest, records: dict[str, Record]) -> Refused | None:
    """Returns why a save cannot point at the objects that its manifest says are stored, or at new ones; or None."""
    for entry in manifest.objects:
        record = records.get(entry.key)
        if not entry.parts:
            if record is not None:
                return Refused(f"object {entry.key} is stored already; keys are used once", "invalid")
        elif record is None or record.namespace != manifest.namespace:
            return Refused(f"object {entry.key}, which it shares, is not stored any more", "gone")
        elif record.entry._replace(place="") != entry._replace(place=""):
            return Refused(f"object {entry.key}, which it shares, is stored with other contents", "invalid")
    return None
