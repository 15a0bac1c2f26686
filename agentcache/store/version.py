"""What the checkpoint index holds: versions and the block objects that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np

from agentcache.store.extents import Extent, NewObject
from agentcache.store.scores import Codes
from agentcache.types import Run, complement

__all__ = ["Adopted", "BlockObject", "IndexStats", "Refusal", "SavePlan", "Version", "VersionState"]

VersionState = Literal["saving", "committed", "dropped"]


@dataclass(slots=True, eq=False)
class Version:
    """The KV of one rendered prompt and its reply, as extents of shared objects. Only the index changes it.

    Attributes:
        version_id: Unique in its namespace.
        namespace: Tenant.
        group: Versions of one group (an episode) are evicted together.
        parent: Id of the version that it was recovered from; it need not exist any more.
        token_ids: `[T]` int32, read-only.
        exact_end: Leading rows whose KV is that of a full prefill.
        salts: `(block index, salt)` of its lineage's block hashes.
        extents: Stored rows, ascending and disjoint.
        state: `saving` until its payloads are stored; `dropped` when nobody can find it any more.
        pins: Open loads, and one while it is saved. A pinned version is not evicted; its objects outlive even a drop.
        attention: How much each row was attended to when it was saved, `[T]` codes of `store.scores`; None when that was not
            measured.
    """

    version_id: str
    namespace: str
    group: str
    parent: str | None
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    exact_end: int
    salts: tuple[tuple[int, bytes], ...]
    extents: tuple[Extent, ...]
    state: VersionState = "saving"
    pins: int = 0
    attention: Codes | None = None

    @property
    def key(self) -> tuple[str, str]:
        """`(namespace, version_id)`."""
        return self.namespace, self.version_id

    def missing(self) -> tuple[Run, ...]:
        """Returns the runs of token positions without stored KV, ascending."""
        return complement(((extent.position, extent.stop) for extent in self.extents), len(self.token_ids))


@dataclass(slots=True, eq=False)
class BlockObject:
    """An immutable payload of rows that were computed together; any number of versions point into it.

    Attributes:
        object_id: Never used twice in this process.
        key: Its name in every tier, never used twice by any process.
        tokens: Rows.
        source_position: Row j was computed at position `source_position + j`; keys rotate once, from there.
        size_bytes: Payload over all ranks: an estimate until its save is committed.
        exact: Whether the rows were those of a full prefill of the version that computed them.
        lossless: Whether the payload holds them bit by bit.
        tag: Precision of the payload; `mixed` when its rows differ.
        parts: What the tier below keeps of it, one entry a rank; empty when it has nothing. The tier's own values.
        users: Versions that point at it.
        pinned: How many of them are pinned.
    """

    object_id: int
    key: str
    tokens: int
    source_position: int
    size_bytes: int
    exact: bool
    lossless: bool = True
    tag: str = "exact"
    parts: tuple[Any, ...] = ()
    users: set[Version] = field(default_factory=set)
    pinned: int = 0

    @property
    def refs(self) -> int:
        """How many versions point at it."""
        return len(self.users)


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A save that was accepted.

    Attributes:
        version: The new version, in state `saving`, pinned until `commit` or `abort_save`.
        new: Rows whose payloads the worker must gather; empty when everything is shared.
        evicted: Objects that were freed to make room; `take_dropped` reports them too.
    """

    version: Version
    new: tuple[NewObject, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A version of a tier below that the index took in.

    Attributes:
        version: In state `saving`, pinned until `commit` or `abort_save`.
        new: `(object id, key)` of payloads that the workers must fetch; the others are here.
    """

    version: Version
    new: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A save that was refused, with nothing changed."""

    reason: str


class IndexStats(TypedDict):
    """Counters of an index; sizes in bytes.

    `bytes` is what payloads take in the workers and `token_bytes` what the versions' token ids take here; the budget
    bounds their sum. `pinned_bytes` is the part of the sum that cannot be evicted now.
    """

    versions: int
    groups: int
    objects: int
    bytes: int
    token_bytes: int
    pinned_bytes: int
    budget_bytes: int
    evictions: int
    refusals: int
