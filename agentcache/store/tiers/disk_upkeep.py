"""What keeps a store folder whole: giving back space, reading everything once, and clearing away what crashes left."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from agentcache.store.tiers.catalog import Catalog, Place
from agentcache.store.tiers.folder import Folder
from agentcache.store.tiers.manifest import ObjectEntry, payload_checksum
from agentcache.store.tiers.outcomes import GcReport, Lost, Refused, VerifyReport
from agentcache.store.tiers.tier import Claimed
from agentcache.types import complement

__all__ = ["collect_folder", "free_payloads", "verify_folder"]

logger = logging.getLogger(__name__)


def free_payloads(catalog: Catalog, gone: Iterable[tuple[Place, ObjectEntry]]) -> None:
    """Gives back the space of objects that nothing points at: whole files, or stretches of files; raises OSError."""
    folder = catalog.folder
    for place, entry in gone:
        for rank, offset in enumerate(place.offsets):
            path = folder.payload_path(place.save, rank)
            if place.save not in catalog.live:
                folder.files.unlink(path)
            elif not folder.files.give_back(path, offset, entry.parts[rank].size_bytes):
                logger.info(
                    "the file system frees no parts of files: %s keeps its size until all of it is unused", path
                )


def verify_folder(
    catalog: Catalog,
    lock: AbstractContextManager[object],
    read: Callable[[list[ObjectEntry], int], Mapping[str, Claimed | Lost]],
) -> VerifyReport:
    """Returns what reading every manifest and every payload found; raises OSError when the folder cannot be listed.

    Args:
        catalog: Of the folder.
        lock: Serialises access to the catalog; not held while files are read.
        read: Returns one rank's payloads of objects.
    """
    with lock:
        catalog.distrust()
        catalog.refresh()
        files = dict(catalog.files)
        faults = [f"{file}: {bad.reason}" for file, bad in catalog.unreadable.items()]
        keys = {key for name in files for key in catalog.ledger.holders[name].keys}
        entries = {key: catalog.ledger.records[key].entry for key in keys}
    for file in files.values():
        fault = _manifest_fault(catalog, lock, file)
        if fault is not None:
            faults.append(f"{file}: {fault}")
    checked = 0
    for key, entry in entries.items():
        for rank, part in enumerate(entry.parts):
            checked += part.size_bytes
            fault = _payload_fault(read([entry], rank).get(key), key, rank)
            if fault is None:
                continue
            with lock:
                catalog.refresh()
                if key in catalog.ledger.records:  # else it was evicted while we read
                    faults.append(f"object {key} of rank {rank}: {fault}")
    with lock:
        catalog.refresh()
        kept = sum(catalog.files.get(name) == file for name, file in files.items())
    return VerifyReport(kept, len(entries), checked, tuple(faults))


def _manifest_fault(catalog: Catalog, lock: AbstractContextManager[object], file: str) -> str | None:
    try:
        data = (catalog.folder.versions / file).read_bytes()
    except FileNotFoundError:
        return None  # evicted by another process while we read
    with lock:
        found = catalog.decode(file, data)
    return found.reason if isinstance(found, Refused) else None


def _payload_fault(found: Claimed | Lost | None, key: str, rank: int) -> str | None:
    if isinstance(found, Claimed):
        return None if payload_checksum(key, rank, found.blob) == found.checksum else "its checksum does not match"
    return "it has no such part" if found is None else found.reason


def collect_folder(catalog: Catalog) -> GcReport | Refused:
    """Removes what no version needs; to be called by the writer, on an up-to-date catalog; raises OSError.

    Damaged manifests go, and with them the payloads that only they named. When a manifest is of another format, it cannot
    be told which payloads it needs: then nothing is removed. Nor when one cannot be read.
    """
    folder = catalog.folder
    unknown = [(file, bad) for file, bad in catalog.unreadable.items() if bad.kind != "corrupt"]
    if unknown:
        (file, bad), more = unknown[0], len(unknown) - 1
        return Refused(f"nothing was removed: {file}: {bad.reason}" + f" (and {more} others)" * bool(more), bad.kind)
    freed = manifests = payloads = 0
    if catalog.unreadable:
        with folder.change(catalog.latest_sequence):
            for file in [*catalog.unreadable]:
                path = folder.versions / file
                freed += path.stat().st_size
                folder.files.unlink(path)
                del catalog.unreadable[file]
                manifests += 1
        catalog.own_change()
    live: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in catalog.ledger.records.values():
        save, offsets = Place.of(record.entry)
        for rank, (offset, part) in enumerate(zip(offsets, record.entry.parts, strict=True)):
            live[folder.payload_path(save, rank).name].append((offset, offset + part.size_bytes))
    open_saves = {Folder.ticket_save(ticket) for ticket in catalog.saves}
    for name in os.listdir(folder.payloads):
        path = folder.payloads / name
        if name in live:
            freed += _free_dead_stretches(folder, path, live[name])
        elif Folder.payload_save(name) not in open_saves:
            freed += path.stat().st_size
            folder.files.unlink(path)
            payloads += 1
    for owner in os.listdir(folder.owners):
        if folder.is_abandoned(f"{owner}-"):
            folder.files.unlink(folder.owners / owner)
    return GcReport(0, manifests, payloads, freed)


def _free_dead_stretches(folder: Folder, path: Path, live: Iterable[tuple[int, int]]) -> int:
    """Gives back what lies between the live stretches of a payload file; returns how many bytes that freed."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        header = 8 + int.from_bytes(file.read(8), "little")
    for start, stop in complement(live, status.st_size, min(header, status.st_size)):
        folder.files.give_back(path, start, stop - start)
    return 512 * (status.st_blocks - path.stat().st_blocks)
