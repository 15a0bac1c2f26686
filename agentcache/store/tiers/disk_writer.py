"""The one writer of a store folder: opens, publishes and ends saves, evicts and deletes, under the folder's lock."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from agentcache.store.tiers.catalog import Catalog, Draft, Place
from agentcache.store.tiers.disk_upkeep import free_payloads
from agentcache.store.tiers.folder import Folder
from agentcache.store.tiers.ledger import inherited_fault
from agentcache.store.tiers.manifest import Manifest, ObjectEntry
from agentcache.store.tiers.outcomes import Refused
from agentcache.store.tiers.rank_files import move_payloads, place_objects, read_draft

__all__ = ["FolderWriter", "disk_failed"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class FolderWriter:
    """Changes a folder and its catalog together. `open_save` and `drop` are to be called inside `do`.

    Args:
        catalog: Of the folder.
        lock: Serialises access to the catalog. It is held for moments only: readers wait for no disk.
        budget_bytes: Most bytes of all processes.
        timeout_s: How long another process may hold the folder's lock.

    Attributes:
        evictions: Versions that were evicted by this process.
        ended: Saves that the last `do` ended, because they were aborted or their process is gone.
    """

    def __init__(self, catalog: Catalog, lock: threading.RLock, budget_bytes: int, timeout_s: float) -> None:
        self.catalog = catalog
        self.folder = catalog.folder
        self.files = catalog.folder.files
        self.lock = lock
        self.budget_bytes = budget_bytes
        self.evictions = 0
        self.ended = 0
        self._timeout_s = timeout_s
        self._one = threading.Lock()  # this process's writers; taken before the folder's lock
        self._doomed: set[str] = set()  # saves that are to be ended

    def do(self, action: Callable[[], T]) -> T | Refused:
        """Returns what an action gives that runs as the folder's only writer, on an up-to-date catalog."""
        with self._one:
            try:
                with self.folder.lock(self._timeout_s):
                    with self.lock:
                        self.catalog.refresh()
                    self._look_at_saves()
                    return action()
            except OSError as error:
                with self.lock:
                    self.catalog.distrust()
                return disk_failed(error)

    def _look_at_saves(self) -> None:
        """Learns of the saves that other processes opened, and ends those that were aborted or whose process is gone."""
        catalog = self.catalog
        self.ended = 0
        with self.lock:
            there = {name for name in os.listdir(self.folder.staging) if Folder.ticket_save(name) is not None}
            over = {t for t in there if t in self._doomed or self.folder.is_abandoned(t)}
            for ticket in there - over - catalog.saves.keys():
                draft = read_draft(self.folder, ticket)
                if draft is not None:
                    catalog.open_save(ticket, draft)
            over |= catalog.saves.keys() - there
        for ticket in over:
            draft = catalog.saves.get(ticket) or read_draft(self.folder, ticket)
            with self.lock:
                gone = catalog.remove(ticket) if ticket in catalog.saves else []
            free_payloads(catalog, gone)
            save = Folder.ticket_save(ticket)
            if draft is not None and save is not None and save not in catalog.live:
                for rank in range(draft.manifest.ranks):  # it may have got so far that its payloads were moved
                    self.files.unlink(self.folder.payload_path(save, rank))
            self.files.remove_folder(self.folder.staging / ticket)
            self._doomed.discard(ticket)
            self.ended += ticket in there

    def open_save(self, manifest: Manifest, reserve_bytes: int) -> str | Refused:
        """Returns the ticket of a new save, with room made for it, or a refusal; raises OSError."""
        catalog = self.catalog
        with self.lock:
            if manifest.name in catalog.files:
                return Refused(f"version {manifest.version!r} exists already", "exists")
            records = catalog.ledger.records
            fault = inherited_fault(manifest, records)
            if fault is not None:
                return fault
            kept = manifest.with_objects(records[e.key].entry if e.parts else e for e in manifest.objects)
            draft = Draft(kept, reserve_bytes)
            ticket = self.folder.new_ticket()
            # Added first, so that what it shares is not evicted to make room for it.
            catalog.open_save(ticket, draft)
            victims = catalog.ledger.victims(0, self.budget_bytes, catalog.score_on_disk)
            if isinstance(victims, Refused):
                catalog.remove(ticket)
                return victims
        try:
            self.files.make_folder(self.folder.staging / ticket)
            self.files.write_whole(self.folder.staging / ticket / "draft", draft.encode(), sync=False)
            self.drop([victim.name for victim in victims])
        except OSError:
            self._doomed.add(ticket)
            raise
        self.evictions += len(victims)
        return ticket

    def publish(self, ticket: str) -> Manifest | Refused:
        """Makes the version of a save visible, by one rename. The folder is locked for the manifest's write alone."""
        try:
            draft = self.catalog.saves.get(ticket) or read_draft(self.folder, ticket)
            if draft is None or ticket in self._doomed:
                return Refused("there is no such open save", "invalid")
            placed = place_objects(self.folder, ticket, draft)
            if isinstance(placed, Refused):
                return placed
            move_payloads(self.folder, ticket, draft.manifest)
        except OSError as error:
            return disk_failed(error)
        sealed = self.do(lambda: self._link(ticket, draft.manifest, placed))
        if isinstance(sealed, Manifest):
            try:
                self.files.sync_folder(self.folder.versions)
                self.files.remove_folder(self.folder.staging / ticket)
            except OSError as error:
                self._doomed.add(ticket)
                logger.warning("version %r is stored, but a power cut may undo it: %s", sealed.version, error)
        return sealed

    def _link(self, ticket: str, manifest: Manifest, placed: Mapping[str, ObjectEntry]) -> Manifest | Refused:
        """Writes the manifest of a save whose payloads are in place, and moves it to where it is seen; raises OSError."""
        catalog = self.catalog
        with self.lock:
            if ticket not in catalog.saves:
                return Refused("there is no such open save", "invalid")
            if manifest.name in catalog.files:
                return Refused(f"version {manifest.version!r} exists already", "exists")
            fault = inherited_fault(manifest, catalog.ledger.records)
            if fault is not None:
                return fault
            sequence, last_use = self.folder.next_sequence(catalog.latest_sequence), catalog.tick()
        sealed = manifest.with_objects((placed.get(e.key, e) for e in manifest.objects), sequence)
        home = self.folder.staging / ticket
        target = self.folder.manifest_path(sealed.name, sequence)
        self.files.write_whole(home / "manifest", sealed.encode())
        self.files.mark_use(home / "manifest", last_use, 0)
        try:
            with self.lock, self.folder.change(catalog.latest_sequence):
                self.files.rename(home / "manifest", target)
            self.files.unlink(home / "draft")  # nobody takes it for an open save any more
        except OSError as error:
            if not target.exists():
                raise
            logger.warning(
                "version %r is stored; what is left of its save could not be removed: %s", sealed.version, error
            )
        with self.lock:
            if sealed.name not in catalog.files:  # else another thread has looked into the folder
                catalog.add(sealed, last_use)
            catalog.own_change()
            catalog.remove(ticket)
        return sealed

    def end_save(self, ticket: str) -> None:
        """Ends an open save, now or, when the folder cannot be written now, with the next change."""
        self._doomed.add(ticket)
        ended = self.do(lambda: None)
        if isinstance(ended, Refused):
            logger.warning("an open save could not be ended; the next one will try again: %s", ended.reason)

    def drop(self, names: Sequence[str]) -> None:
        """Removes versions: their manifests first, so that a crash leaves payloads that `gc` finds."""
        if not names:
            return
        catalog = self.catalog
        gone: list[tuple[Place, ObjectEntry]] = []
        with self.lock, self.folder.change(catalog.latest_sequence):
            for name in names:
                self.files.unlink(self.folder.versions / catalog.files[name])
                gone += catalog.remove(name)
        with self.lock:
            catalog.own_change()
        self.files.sync_folder(self.folder.versions)
        free_payloads(catalog, gone)

    def close(self) -> None:
        """Ends this handle's open saves."""
        with self.lock:
            self._doomed |= {ticket for ticket in self.catalog.saves if self.folder.is_own(ticket)}
        if self._doomed:
            self.do(lambda: None)


def disk_failed(error: OSError) -> Refused:
    """Returns the refusal that a failure of the file system is."""
    return Refused(f"the disk store failed: {error.strerror or error}", "unavailable")
