"""What a checkpoint store answers instead of raising: refusals, misses and lost payloads are values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np

__all__ = [
    "Blob",
    "BlobLike",
    "GcReport",
    "Lost",
    "Miss",
    "Refused",
    "StoreStats",
    "Stored",
    "VerifyReport",
    "VersionInfo",
]

Blob = np.ndarray[Any, np.dtype[np.uint8]]
"""Bytes of one object on one rank, `[bytes]`. Stores and callers share it: nobody may change it."""

BlobLike = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Refused:
    """The store did not do what it was asked, and changed nothing that can be seen.

    Attributes:
        reason: One clause, for the request's report.
        kind: `full` the budget does not hold it; `exists` a version is created once; `gone` an object that it shares is not
            stored any more; `foreign` another model, dtype, rotary or format; `corrupt` the manifest was damaged;
            `invalid` the call does not fit the save; `unavailable` the disk or the server failed.
    """

    reason: str
    kind: Literal["full", "exists", "gone", "foreign", "corrupt", "invalid", "unavailable"]


@dataclass(frozen=True, slots=True)
class Miss:
    """No such version is stored in this namespace: never saved, evicted or deleted."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A payload that cannot be had; its rows are to be recomputed."""

    reason: str
    kind: Literal["absent", "corrupt", "unavailable"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A payload that was taken.

    Attributes:
        size_bytes: Its length.
        checksum: `payload_checksum` of it.
    """

    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One line of a listing.

    Attributes:
        namespace: Tenant.
        version: Its id.
        group: Its episode.
        parent: The version it was recovered from.
        tokens: Its length.
        objects: How many objects it points at.
        payload_bytes: Their bytes on all ranks, shared ones included.
        sequence: Order of creation in this store.
    """

    namespace: str
    version: str
    group: str
    parent: str | None
    tokens: int
    objects: int
    payload_bytes: int
    sequence: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading everything found.

    Attributes:
        versions: Manifests that were read.
        objects: Objects whose payloads were read.
        payload_bytes: Bytes whose checksums were compared.
        faults: One sentence each; empty when all is well.
    """

    versions: int
    objects: int
    payload_bytes: int
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was cleared away.

    Attributes:
        saves: Abandoned saves of processes that are gone.
        manifests: Manifests that could not be read.
        payloads: Payload files or values that no version points at.
        freed_bytes: Bytes of all of them.
    """

    saves: int = 0
    manifests: int = 0
    payloads: int = 0
    freed_bytes: int = 0

    def __add__(self, other: GcReport) -> GcReport:
        return GcReport(
            self.saves + other.saves,
            self.manifests + other.manifests,
            self.payloads + other.payloads,
            self.freed_bytes + other.freed_bytes,
        )


class StoreStats(TypedDict):
    """Counters of one tier since it was opened, and its present sizes in bytes.

    `used_bytes` is what the budget bounds: payloads, manifests, and what open saves have reserved.
    """

    tier: str
    versions: int
    objects: int
    used_bytes: int
    reserved_bytes: int
    budget_bytes: int
    bytes_by_tag: dict[str, int]
    hits: int
    misses: int
    saves: int
    evictions: int
    refusals: dict[str, int]
    lost: dict[str, int]
