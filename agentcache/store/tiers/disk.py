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
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.store.tiers.base import Observer
from agentcache.store.tiers.catalog import Catalog, Draft, Place
from agentcache.store.tiers.disk_upkeep import collect_folder, free_payloads, verify_folder
from agentcache.store.tiers.files import Files
from agentcache.store.tiers.folder import Folder
from agentcache.store.tiers.ledger import inherited_fault
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, Part, version_name
from agentcache.store.tiers.outcomes import Blob, GcReport, Lost, Miss, Refused, VerifyReport, VersionInfo
from agentcache.store.tiers.rank_files import RankWriters, move_payloads, place_objects, read_draft
from agentcache.store.tiers.tier import Claimed, Sizes, Tier

__all__ = ["DiskStore"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        self.lock_timeout_s = lock_timeout_s
        self._files = files or Files(fsync)
        self._folder = Folder(Path(folder), self._files)
        self._catalog = Catalog(self._folder, policy)
        self._lock = threading.RLock()  # the catalog
        self._write_lock = threading.Lock()  # this process's writers; taken before the folder's lock
        self._writers = RankWriters(self._folder, self._files)
        self._doomed: set[str] = set()  # saves that could not be ended when they should
        self._ended = 0  # saves that the last look at them ended
        self._evictions = 0
        try:
            with self._lock:
                self._catalog.refresh()
        except OSError as error:
            raise self._folder.fault(error) from error

    # -- saving --------------------------------------------------------------------------------------------------------

    def _prepare(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        return self._write(lambda: self._open_save(manifest, reserve_bytes))

    def _open_save(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        catalog = self._catalog
        with self._lock:
            if manifest.name in catalog.files:
                return Refused(f"version {manifest.version!r} exists already", "exists")
            records = catalog.ledger.records
            fault = inherited_fault(manifest, records)
            if fault is not None:
                return fault
            kept = manifest.with_objects(records[e.key].entry if e.parts else e for e in manifest.objects)
            draft = Draft(kept, reserve_bytes)
            ticket = self._folder.new_ticket()
            # Added first, so that what it shares is not evicted to make room for it.
            catalog.open_save(ticket, draft)
            victims = catalog.ledger.victims(0, self.budget_bytes, catalog.score_on_disk)
            if isinstance(victims, Refused):
                catalog.remove(ticket)
                return victims
        try:
            self._files.make_folder(self._folder.staging / ticket)
            self._files.write_whole(self._folder.staging / ticket / "draft", draft.encode())
            self._drop([victim.name for victim in victims])
        except OSError:
            self._doomed.add(ticket)
            raise
        self._evictions += len(victims)
        return ticket

    def _put(self, ticket: str, key: str, rank: int, blob: Blob, checksum: str) -> Refused | None:
        try:
            return self._writers.put(ticket, key, rank, blob, checksum)
        except OSError as error:
            return _unavailable(error)

    def _complete(self, ticket: str) -> Manifest | Refused:
        return self._write(lambda: self._publish(ticket))

    def _publish(self, ticket: str) -> Manifest | Refused:
        catalog = self._catalog
        draft = catalog.saves.get(ticket)
        if draft is None or ticket in self._doomed:
            return Refused("there is no such open save", "invalid")
        placed = place_objects(self._folder, ticket, draft)
        if isinstance(placed, Refused):
            return placed
        with self._lock:
            if draft.manifest.name in catalog.files:
                return Refused(f"version {draft.manifest.version!r} exists already", "exists")
            fault = inherited_fault(draft.manifest, catalog.ledger.records)
            if fault is not None:
                return fault
            sequence, last_use = self._folder.next_sequence(catalog.latest_sequence), catalog.tick()
        sealed = draft.manifest.with_objects((placed.get(e.key, e) for e in draft.manifest.objects), sequence)
        move_payloads(self._folder, ticket, draft.manifest)
        staged = self._folder.staging / ticket / "manifest"
        target = self._folder.manifest_path(sealed.name, sequence)
        self._files.write_whole(staged, sealed.encode())
        self._files.mark_use(staged, last_use, 0)
        try:
            with self._lock:
                with self._folder.change(catalog.latest_sequence):
                    self._files.rename(staged, target)
                catalog.add(sealed, last_use)
                catalog.own_change()
            self._files.sync_folder(self._folder.versions)
        except OSError:
            self._files.unlink(target)  # a refused save leaves nothing that can be found
            raise
        with self._lock:
            catalog.remove(ticket)
        self._files.remove_folder(self._folder.staging / ticket)
        return sealed

    def _abort(self, ticket: str) -> None:
        if ticket in self._catalog.saves:
            self._doomed.add(ticket)
            ended = self._write(lambda: None)
            if isinstance(ended, Refused):
                logger.warning("an open save could not be ended; the next one will try again: %s", ended.reason)

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
            return _unavailable(error)
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
            lost = Lost(_unavailable(error).reason, "unavailable")
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
                lost = Lost(_unavailable(error).reason, "absent" if gone else "unavailable")
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
                self._drop([name])
            return known

        return self._write(delete)

    def versions(self, namespace: str | None = None) -> tuple[VersionInfo, ...] | Refused:
        """See `KVStore`."""
        try:
            with self._lock:
                self._catalog.refresh()
                found = [info for info in self._catalog.infos() if namespace is None or info.namespace == namespace]
        except OSError as error:
            return _unavailable(error)
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
            return _unavailable(error)

    def gc(self) -> GcReport | Refused:
        """See `KVStore`."""

        def collect() -> GcReport | Refused:
            with self._lock:
                report = collect_folder(self._catalog)
            return report if isinstance(report, Refused) else GcReport(saves=self._ended) + report

        return self._write(collect)

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

        done = self._write(check)
        assert not isinstance(done, Refused), done.reason

    def close(self) -> None:
        """See `KVStore`."""
        with self._lock:
            own = [ticket for ticket in self._catalog.saves if self._folder.is_own(ticket)]
        for ticket in own:
            self.abort(ticket)
        self._writers.close()
        self._folder.close()

    def _sizes(self) -> Sizes:
        with self._lock:
            ledger = self._catalog.ledger
            reserved = sum(ledger.holders[ticket].own_bytes for ticket in self._catalog.saves)
            tags = dict(ledger.bytes_by_tag)
            return Sizes(
                len(self._catalog.files), len(ledger.records), ledger.used_bytes, reserved, self._evictions, tags
            )

    # -- the one writer ------------------------------------------------------------------------------------------------

    def _write(self, action: Callable[[], T]) -> T | Refused:
        """Returns what an action gives that runs as the folder's only writer, on an up-to-date catalog."""
        with self._write_lock:
            try:
                with self._folder.lock(self.lock_timeout_s):
                    with self._lock:
                        self._catalog.refresh()
                    self._look_at_saves()
                    return action()
            except OSError as error:
                with self._lock:
                    self._catalog.distrust()
                return _unavailable(error)

    def _look_at_saves(self) -> None:
        """Learns of the saves that other processes opened, and ends those that were aborted or whose process is gone."""
        catalog = self._catalog
        self._ended = 0
        with self._lock:
            there = {name for name in os.listdir(self._folder.staging) if Folder.ticket_save(name) is not None}
            over = {t for t in there if t in self._doomed or self._folder.is_abandoned(t)}
            for ticket in there - over - catalog.saves.keys():
                draft = read_draft(self._folder, ticket)
                if draft is not None:
                    catalog.open_save(ticket, draft)
            over |= catalog.saves.keys() - there
        for ticket in over:
            draft = catalog.saves.get(ticket) or read_draft(self._folder, ticket)
            with self._lock:
                gone = catalog.remove(ticket) if ticket in catalog.saves else []
            free_payloads(catalog, gone)
            save = Folder.ticket_save(ticket)
            if draft is not None and save is not None and save not in catalog.live:
                for rank in range(draft.manifest.ranks):  # it may have got so far that its payloads were moved
                    self._files.unlink(self._folder.payload_path(save, rank))
            self._files.remove_folder(self._folder.staging / ticket)
            self._doomed.discard(ticket)
            self._ended += ticket in there

    def _drop(self, names: list[str]) -> None:
        """Removes versions: their manifests first, so that a crash leaves payloads that `gc` finds."""
        if not names:
            return
        catalog = self._catalog
        gone: list[tuple[Place, ObjectEntry]] = []
        with self._lock, self._folder.change(catalog.latest_sequence):
            for name in names:
                self._files.unlink(self._folder.versions / catalog.files[name])
                gone += catalog.remove(name)
        with self._lock:
            catalog.own_change()
        self._files.sync_folder(self._folder.versions)
        free_payloads(catalog, gone)


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


def _unavailable(error: OSError) -> Refused:
    return Refused(f"the disk store failed: {error.strerror or error}", "unavailable")
