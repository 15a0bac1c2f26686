"""The contract of a checkpoint store: two-phase saves, verified loads, and answers instead of exceptions.

```
scheduler   prepare(manifest, bytes) -> ticket ......................... complete(ticket) -> the sealed manifest
each rank                        put(ticket, key, rank, blob) ...
scheduler   find(namespace, version) -> manifest
each rank                                         fetch(keys, rank) -> blobs
```

A version cannot be found before `complete` returned, and then as a whole. A save that is not completed leaves nothing. Where
`shared` says so, each process opens the same store for itself, and a ticket is good in all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from types import TracebackType
from typing import ClassVar, Protocol, Self

from agentcache.store.tiers.manifest import Manifest
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

__all__ = ["HINT_USES", "KVStore", "Observer"]

HINT_USES = 1024
"""What a hint of weight 1 is worth: the version is evicted as if it had been used that many uses of others later."""


class Observer(Protocol):
    """Whoever wants to know how long things took; see `agentcache.metrics`."""

    def saved(self, tier: str, seconds: float) -> None:
        """A save was completed, `seconds` after it was prepared."""

    def restored(self, tier: str, seconds: float, size_bytes: int) -> None:
        """Payloads were fetched and their checksums compared."""


class KVStore(ABC):
    """Checkpoints. Any thread may call; nothing is raised for what a disk, a server or another process did."""

    tier: ClassVar[str]
    """Its name in counters and metrics."""
    durable: ClassVar[bool]
    """Whether versions survive the process."""
    shared: ClassVar[bool]
    """Whether other processes that open the same store take part in one save."""

    # -- saving --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        """Opens a save and makes room for it, by evicting whole versions when the budget asks for it.

        Args:
            manifest: From `Manifest.draft`. Objects that have parts must be stored already, in this namespace; they are
                kept until the save ends.
            reserve_bytes: Most bytes that the ranks will `put` together.

        Returns:
            The ticket of the save, or a refusal with nothing changed.
        """

    @abstractmethod
    def put(self, ticket: str, key: str, rank: int, blob: BlobLike) -> Stored | Refused:
        """Stores one rank's payload of a new object of an open save.

        Args:
            ticket: From `prepare`, in this or in another process.
            key: One of the manifest's `new_objects`.
            rank: In `[0, manifest.ranks)`.
            blob: Its bytes, contiguous. They must never change again: the store may keep them as they are.
        """

    @abstractmethod
    def complete(self, ticket: str) -> Manifest | Refused:
        """Makes a version findable, all at once, when every rank has stored every new object.

        Returns:
            The manifest with all parts, for the objects that later versions share; or a refusal, and the save stays open.
        """

    @abstractmethod
    def abort(self, ticket: str) -> None:
        """Ends an open save and forgets what was put; one that is unknown is ignored."""

    # -- loading -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        """Returns a version's manifest, whole and made for this engine, and marks it as used."""

    @abstractmethod
    def fetch(self, keys: Iterable[str], rank: int) -> dict[str, Blob | Lost]:
        """Returns one rank's payloads by key; each is what was put, or lost. The blobs must not be changed."""

    @abstractmethod
    def hint(self, namespace: str, version: str, weight: float = 1.0) -> bool:
        """Says how likely a resume is: 1 for an open pause, more for an announced resume, 0 when it is over.

        Returns:
            Whether the version is here. With a weight it is evicted later, as `HINT_USES` says.
        """

    # -- keeping -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def delete(self, namespace: str, version: str) -> bool | Refused:
        """Removes a version and what only it used; returns whether it was there."""

    @abstractmethod
    def versions(self, namespace: str | None = None) -> tuple[VersionInfo, ...] | Refused:
        """Returns all versions, or those of one namespace, by creation."""

    @abstractmethod
    def has(self, namespace: str, version: str) -> bool:
        """Whether a version is here, which counts as no use; False when that cannot be told."""

    @abstractmethod
    def holds(self, keys: Collection[str]) -> frozenset[str]:
        """Returns which of these objects completed versions point at; none when that cannot be told."""

    @abstractmethod
    def verify(self) -> VerifyReport | Refused:
        """Reads every manifest and every payload and compares all checksums; changes nothing."""

    @abstractmethod
    def gc(self) -> GcReport | Refused:
        """Clears away what crashes left behind: abandoned saves, damaged manifests, payloads that nothing points at."""

    @abstractmethod
    def stats(self) -> tuple[StoreStats, ...]:
        """Returns the counters, one entry a tier, fastest first."""

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
