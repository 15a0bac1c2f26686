"""The disk tier: a folder that several processes share and that survives all of them.

A save is written beside the store and moved into it: payloads first, then the manifest, each fsynced and then renamed, so
that a process killed at any point leaves a whole version or none. A reader takes no lock; what another process evicts
under it is lost to it, never wrong, for every byte is checked.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.store.tiers.base import Observer
from agentcache.store.tiers.catalog import Catalog, Place
from agentcache.store.tiers.disk_upkeep import collect_folder, verify_folder
from agentcache.store.tiers.disk_writer import FolderWriter, disk_failed
from agentcache.store.tiers.files import Files
from agentcache.store.tiers.folder import Folder
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, Part, version_name
from agentcache.store.tiers.outcomes import Blob, GcReport, Lost, Miss, Refused, VerifyReport, VersionInfo
from agentcache.store.tiers.rank_files import RankWriters
from agentcache.store.tiers.tier import Claimed, Sizes, Tier

__all__ = ["DiskStore"]

logger = logging.getLogger(__name__)


class DiskStore(Tier):
    """Manifests and safetensors files in a folder. Several handles, of several processes, may be open at once.

    The budget bounds payloads and manifests; the file system's rounding (under 8 KiB a save and rank) comes on top.

    Args:
        folder: Made when it is missing. A folder that holds something else is refused.
        budget_bytes: Most bytes of payloads, manifests and reservations of all processes.
        policy: Name of the eviction policy, see `ledger.POLICIES`.
        fsync: See `Files`.
        lock_timeout_s: How long a save may wait for another process's before it is refused.
        fingerprint: See `Tier`.
        observer: See `Tier`.
        files: What changes the file system, for tests.

    Raises:
        ConfigError: The policy or a number is not allowed.
        StoreError: The folder cannot be opened.
    """

    tier: ClassVar[str] = "disk"
    durable: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        budget_bytes: int,
        *,
        policy: str = "lru",
        fsync: bool = True,
        lock_timeout_s: float = 5.0,
        fingerprint: Mapping[str, str] | None = None,
        observer: Observer | None = None,
        files: Files | None = None,
    ) -> None:
        super().__init__(budget_bytes, fingerprint=fingerprint, observer=observer)
        if not 0 <= lock_timeout_s <= 3600:
            raise ConfigError(f"lock_timeout_s={lock_timeout_s} is not allowed; give 0 to 3600 seconds")
        self._files = files or Files(fsync)
        self._folder = Folder(Path(folder), self._files)
        self._catalog = Catalog(self._folder, policy)
        self._lock = threading.RLock()  # the catalog
        self._writer = FolderWriter(self._catalog, self._lock, budget_bytes, lock_timeout_s)
        self._ranks = RankWriters(self._folder, self._files)
        try:
            with self._lock:
                self._catalog.refresh()
        except OSError as error:
            raise self._folder.fault(error) from error

    # -- saving --------------------------------------------------------------------------------------------------------

    def _prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        return self._writer.do(lambda: self._writer.open_save(manifest, reserve_bytes))

    def _put(self, ticket: str, key: str, rank: int, blob: Blob, checksum: str) -> Refused | None:
        try:
            return self._ranks.put(ticket, key, rank, blob, checksum)
        except OSError as error:
            return disk_failed(error)

    def _complete(self, ticket: str) -> Manifest | Refused:
        return self._writer.publish(ticket)

    def _abort(self, ticket: str) -> None:
        if ticket in self._catalog.saves:
            self._writer.end_save(ticket)

    # -- loading -------------------------------------------------------------------------------------------------------

    def _find(self, namespace: str, version: str) -> Manifest | Miss | Refused:
        name = version_name(namespace, version)
        try:
            for _ in range(2):  # what another process removed is looked for once more
                with self._lock:
                    if name not in self._catalog.files:
                        self._catalog.refresh()
                    file = self._catalog.files.get(name)
                    if file is None:
                        bad = [r for f, r in self._catalog.unreadable.items() if f.startswith(name)]
                        return bad[-1] if bad else Miss()
                path = self._folder.versions / file
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    with self._lock:
                        self._catalog.distrust()
                        self._catalog.refresh()
                    continue
                with self._lock:
                    found = self._catalog.decode(file, data)
                    if isinstance(found, Manifest):
                        self._use(name, self._catalog.tick(), 0)
                return found
        except OSError as error:
            return disk_failed(error)
        return Miss()

    def _use(self, name: str, last_use: int, uses: int) -> None:
        """Marks a version as used, for this process and, where the folder can be written, for all."""
        holder = self._catalog.ledger.holders.get(name)
        if holder is None or (uses == 0 and holder.score >= last_use):
            return
        holder.score = last_use + uses
        try:
            self._files.mark_use(self._folder.versions / self._catalog.files[name], last_use, uses)
        except OSError as error:
            logger.debug("a use is not recorded for other processes: %s", error)

    def _fetch(self, keys: Collection[str], rank: int) -> Mapping[str, Claimed | Lost]:
        try:
            with self._lock:
                if not all(key in self._catalog.ledger.records for key in keys):
                    self._catalog.refresh()
                records = self._catalog.ledger.records
                entries = [records[key].entry for key in keys if key in records]
        except OSError as error:
            lost = Lost(disk_failed(error).reason, "unavailable")
            return dict.fromkeys(keys, lost)
        return self._read(entries, rank)

    def _read(self, entries: Iterable[ObjectEntry], rank: int) -> dict[str, Claimed | Lost]:
        """Returns a rank's payloads of stored objects, each file opened once."""
        out: dict[str, Claimed | Lost] = {}
        by_save: dict[str, list[tuple[int, ObjectEntry]]] = defaultdict(list)
        for entry in entries:
            place = Place.of(entry)
            if 0 <= rank < len(place.offsets):
                by_save[place.save].append((place.offsets[rank], entry))
        for save, wanted in by_save.items():
            try:
                fd = os.open(self._folder.payload_path(save, rank), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    for offset, entry in sorted(wanted):
                        out[entry.key] = _read_part(fd, offset, entry.parts[rank])
                finally:
                    os.close(fd)
            except OSError as error:
                gone = isinstance(error, FileNotFoundError)
                lost = Lost(disk_failed(error).reason, "absent" if gone else "unavailable")
                out.update({entry.key: lost for _, entry in wanted if entry.key not in out})
        return out

    def _hint(self, namespace: str, version: str, uses: int) -> bool:
        name = version_name(namespace, version)
        with self._lock:
            known = name in self._catalog.files
            if known:
                holder = self._catalog.ledger.holders[name]
                holder.score = 0
                self._use(name, self._catalog.tick(), uses)
            return known

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _delete(self, namespace: str, version: str) -> bool | Refused:
        def delete() -> bool:
            name = version_name(namespace, version)
            known = name in self._catalog.files
            if known:
                self._writer.drop([name])
            return known

        return self._writer.do(delete)

    def versions(self, namespace: str | None = None) -> tuple[VersionInfo, ...] | Refused:
        """See `KVStore`."""
        try:
            with self._lock:
                self._catalog.refresh()
                found = [info for info in self._catalog.infos() if namespace is None or info.namespace == namespace]
        except OSError as error:
            return disk_failed(error)
        return tuple(sorted(found, key=lambda info: info.sequence))

    def has(self, namespace: str, version: str) -> bool:
        """See `KVStore`."""
        name = version_name(namespace, version)
        try:
            with self._lock:
                if name not in self._catalog.files:
                    self._catalog.refresh()
                return name in self._catalog.files
        except OSError as error:
            logger.warning("it cannot be told whether a version is stored: %s", error)
            return False

    def holds(self, keys: Collection[str]) -> frozenset[str]:
        """See `KVStore`."""
        try:
            with self._lock:
                self._catalog.refresh()
                return frozenset(key for key in keys if key in self._catalog.ledger.records)
        except OSError as error:
            logger.warning("it cannot be told which objects are stored: %s", error)
            return frozenset()

    def verify(self) -> VerifyReport | Refused:
        """See `KVStore`."""
        try:
            return verify_folder(self._catalog, self._lock, self._read)
        except OSError as error:
            return disk_failed(error)

    def gc(self) -> GcReport | Refused:
        """See `KVStore`."""

        def collect() -> GcReport | Refused:
            with self._lock:
                self._catalog.reread()
                report = collect_folder(self._catalog)
            return report if isinstance(report, Refused) else GcReport(saves=self._writer.ended) + report

        return self._writer.do(collect)

    def check_integrity(self) -> None:
        """See `KVStore`."""

        def check() -> None:
            with self._lock:
                self._catalog.ledger.check_integrity()
                afresh = Catalog(self._folder, self._catalog.ledger.policy)
                afresh.refresh()
                assert afresh.files == self._catalog.files, "the catalog and the folder differ"
                assert not afresh.ledger.records.keys() - self._catalog.ledger.records.keys()
                assert self._catalog.ledger.used_bytes <= self.budget_bytes, "over budget"

        done = self._writer.do(check)
        assert not isinstance(done, Refused), done.reason

    def close(self) -> None:
        """See `KVStore`."""
        self._writer.close()
        self._ranks.close()
        self._folder.close()

    def _sizes(self) -> Sizes:
        with self._lock:
            ledger = self._catalog.ledger
            reserved = sum(ledger.holders[ticket].own_bytes for ticket in self._catalog.saves)
            tags = dict(ledger.bytes_by_tag)
            return Sizes(
                len(self._catalog.files), len(ledger.records), ledger.used_bytes, reserved, self._writer.evictions, tags
            )


def _read_part(fd: int, offset: int, part: Part) -> Claimed | Lost:
    if offset + part.size_bytes > os.fstat(fd).st_size:
        return Lost("its file is truncated", "corrupt")
    blob = np.empty(part.size_bytes, dtype=np.uint8)
    view, at = blob.data, 0
    while at < len(blob):
        read = os.preadv(fd, [view[at:]], offset + at)
        if not read:
            return Lost("its file was truncated meanwhile", "corrupt")
        at += read
    return Claimed(blob, part.checksum)
