"""What the checks of `conformance` are made with: a back end under test, and versions whose payloads are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, StoredExtent, new_key
from agentcache.store.tiers.outcomes import Blob, Lost, Refused, Stored

__all__ = ["FINGERPRINT", "Backend", "Material", "expect", "found", "refused", "same_version", "used_bytes"]

FINGERPRINT = {"model": "m", "dtype": "bfloat16", "rotary": "r", "tp": "2"}


class Backend(ABC):
    """One empty place to store in, and how to reach behind the store's back.

    Attributes:
        predictable: Whether it evicts in the order of its policy, one version at a time, and only when it must. A store
            of several tiers is not.
    """

    predictable: bool = True

    @abstractmethod
    def open(self, budget_bytes: int = 1 << 30, fingerprint: Mapping[str, str] | None = None) -> KVStore:
        """Returns a handle on the place; a second one, where the store is durable, sees the same versions."""

    @abstractmethod
    def damage(self, store: KVStore, key: str, rank: int) -> None:
        """Changes one bit of a stored payload."""

    def failures(self) -> Sequence[Callable[[], AbstractContextManager[object]]]:
        """Returns circumstances, each a `with` block, under which every write fails."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Removes the place."""


class Material:
    """Makes versions of random payloads, saves them, and remembers what each must read.

    Args:
        seed: Of the payloads.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.blobs: dict[tuple[str, int], Blob] = {}

    def draft(
        self,
        version: str,
        *,
        namespace: str = "red",
        new: Sequence[int] = (300, 200),
        shared: Iterable[ObjectEntry] = (),
        ranks: int = 1,
        tokens: int = 8,
        fingerprint: Mapping[str, str] = FINGERPRINT,
        tag: str = "exact",
    ) -> Manifest:
        """Returns a manifest of shared objects and new ones with payloads of these sizes on every rank."""
        fresh = [ObjectEntry(new_key(), tokens, 0, True, tag) for _ in new]
        for entry, size in zip(fresh, new, strict=True):
            for rank in range(ranks):
                self.blobs[entry.key, rank] = self._rng.integers(0, 256, size, dtype=np.uint8)
        objects = [*shared, *fresh]
        extents, at = [], 0
        for entry in objects:
            extents.append(StoredExtent(entry.key, 0, entry.tokens, at, 1))
            at += entry.tokens
        return Manifest.draft(
            fingerprint=fingerprint,
            namespace=namespace,
            version=version,
            group="episode",
            token_ids=self._rng.integers(0, 50_000, at, dtype=np.int32),
            extents=extents,
            objects=objects,
            exact_end=at,
            salts=[(1, b"\x01\x02")],
            ranks=ranks,
        )

    def reserve(self, draft: Manifest) -> int:
        """Returns how many bytes a draft's new objects have on all ranks."""
        return sum(len(self.blobs[e.key, rank]) for e in draft.new_objects for rank in range(draft.ranks))

    def put(self, store: KVStore, ticket: str, draft: Manifest) -> Refused | None:
        """Stores all new payloads of an open save; returns the first refusal."""
        for rank in range(draft.ranks):
            for entry in draft.new_objects:
                blob = self.blobs[entry.key, rank]
                made = store.put(ticket, entry.key, rank, blob.copy())
                if isinstance(made, Refused):
                    return made
                expect(made == Stored(len(blob), made.checksum), f"put says {made} of {len(blob)} bytes")
        return None

    def save(self, store: KVStore, draft: Manifest) -> Manifest | Refused:
        """Saves a version; one that is refused is aborted."""
        ticket = store.prepare(draft, self.reserve(draft))
        if isinstance(ticket, Refused):
            return ticket
        made = self.put(store, ticket, draft) or store.complete(ticket)
        if isinstance(made, Refused):
            store.abort(ticket)
        return made

    def must_save(self, store: KVStore, draft: Manifest) -> Manifest:
        """Saves a version that nothing speaks against."""
        made = self.save(store, draft)
        expect(isinstance(made, Manifest), f"a save was refused: {made}")
        assert isinstance(made, Manifest)
        return made

    def check(self, store: KVStore, manifest: Manifest, *, lost: Iterable[str] = (), evicted_ok: bool = False) -> None:
        """Checks that a version reads what was put, but for objects that are lost."""
        gone = set(lost)
        for rank in range(manifest.ranks):
            keys = [entry.key for entry in manifest.objects]
            got = store.fetch(keys, rank)
            expect(list(got) == keys, "fetch answers with other keys than were asked for")
            for key, blob in got.items():
                if isinstance(blob, Lost):
                    absent = evicted_ok and blob.kind == "absent"
                    expect(key in gone or absent, f"object {key} of rank {rank} is lost: {blob.reason}")
                else:
                    expect(key not in gone, f"object {key} of rank {rank} should be lost")
                    expect(
                        np.array_equal(blob, self.blobs[key, rank]), f"object {key} of rank {rank} reads other bytes"
                    )


def expect(holds: bool, message: str) -> None:
    """Raises AssertionError with a message unless something holds."""
    if not holds:
        raise AssertionError(message)


def found(store: KVStore, namespace: str, version: str) -> Manifest:
    """Returns a version that must be there."""
    manifest = store.find(namespace, version)
    assert isinstance(manifest, Manifest), f"{version!r} is not found: {manifest}"
    return manifest


def refused(made: object, *kinds: str) -> None:
    """Checks that an answer is a refusal of one of these kinds."""
    expect(isinstance(made, Refused), f"{made!r} is no refusal")
    assert isinstance(made, Refused)
    expect(made.kind in kinds, f"refused as {made.kind!r} ({made.reason}), not as {kinds}")
    expect(bool(made.reason), "a refusal without a reason")


def same_version(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests say the same, wherever the payloads lie and whenever they were stored."""
    plain = [m.with_objects(entry._replace(place="") for entry in m.objects) for m in (one, other)]
    return plain[0] == plain[1]


def used_bytes(store: KVStore) -> int:
    """Returns what all tiers use when nothing is queued."""
    store.flush()
    return sum(stats["used_bytes"] for stats in store.stats())
