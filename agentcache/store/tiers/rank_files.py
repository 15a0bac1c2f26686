"""The ranks' files of open saves: how payloads get into them, and how a completed save takes them over.

Ranks write without the folder's lock; only who completes a save holds it.
"""

from __future__ import annotations

import threading
from pathlib import Path

from agentcache.store.tiers.catalog import Draft, Place
from agentcache.store.tiers.files import Files
from agentcache.store.tiers.folder import Folder
from agentcache.store.tiers.manifest import Manifest, ObjectEntry, Part
from agentcache.store.tiers.outcomes import Blob, Refused
from agentcache.store.tiers.payload_file import PayloadWriter, Stretch, read_header

__all__ = ["RankWriters", "move_payloads", "place_objects", "read_draft"]


def read_draft(folder: Folder, ticket: str) -> Draft | None:
    """Returns the draft of an open save of any process, or None when there is none; raises OSError."""
    if Folder.ticket_save(ticket) is None:
        return None
    try:
        return Draft.decode((folder.staging / ticket / "draft").read_bytes())
    except FileNotFoundError:
        return None


class RankWriters:
    """Open payload files of this process. Any thread may put.

    Args:
        folder: The store's folder.
        files: What changes the file system.
    """

    def __init__(self, folder: Folder, files: Files) -> None:
        self._folder = folder
        self._files = files
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], tuple[PayloadWriter, int]] = {}

    def put(self, ticket: str, key: str, rank: int, blob: Blob, checksum: str) -> Refused | None:
        """Writes one payload, and finishes the rank's file with the last one; raises OSError."""
        found = self._writer(ticket, rank)
        if found is None:
            return Refused("there is no such open save of this rank", "invalid")
        writer, most = found
        part = writer.put(key, blob, checksum, most)
        if isinstance(part, Refused):
            return part
        return (
            None if part == Part(len(blob), checksum) else Refused(f"object {key} has other bytes already", "invalid")
        )

    def _writer(self, ticket: str, rank: int) -> tuple[PayloadWriter, int] | None:
        """Returns a rank's file and how much the save may hold; None when the save or the rank does not exist."""
        with self._lock:
            found = self._open.get((ticket, rank))
            if found is not None:
                return found
            for at, (old, _) in [*self._open.items()]:
                if not old.path.parent.exists():  # its save has ended, perhaps by another process
                    old.close()
                    del self._open[at]
            draft = read_draft(self._folder, ticket)
            if draft is None or not 0 <= rank < draft.manifest.ranks or not draft.manifest.new_objects:
                return None
            path = self._folder.staging / ticket / f"{rank}.safetensors"
            if path.exists():
                return None
            keys = [entry.key for entry in draft.manifest.new_objects]
            self._open[ticket, rank] = PayloadWriter(self._files, path, keys), draft.reserve_bytes
            return self._open[ticket, rank]

    def close(self) -> None:
        """Gives back all descriptors."""
        with self._lock:
            for writer, _ in self._open.values():
                writer.close()
            self._open.clear()


def place_objects(folder: Folder, ticket: str, draft: Draft) -> dict[str, ObjectEntry] | Refused:
    """Returns the new objects of a save as the ranks have stored them, by key; a refusal when something is missing."""
    save, new = Folder.ticket_save(ticket), draft.manifest.new_objects
    assert save is not None
    if not new:
        return {}
    found: list[dict[str, Stretch]] = []
    for rank in range(draft.manifest.ranks):
        staged, moved = _paths(folder, ticket, rank)
        try:
            found.append(read_header(staged if staged.exists() else moved))
        except FileNotFoundError:
            return Refused(f"rank {rank} has not stored all payloads yet", "invalid")
        except ValueError as error:
            return Refused(str(error), "corrupt")
        if found[-1].keys() != {entry.key for entry in new}:
            return Refused(f"rank {rank} has stored other payloads", "corrupt")
    if sum(stretch.size_bytes for rank in found for stretch in rank.values()) > draft.reserve_bytes:
        return Refused(f"the ranks have stored more than the {draft.reserve_bytes} bytes reserved", "full")
    return {
        entry.key: entry._replace(
            parts=tuple(Part(rank[entry.key].size_bytes, rank[entry.key].checksum) for rank in found),
            place=str(Place(save, tuple(rank[entry.key].offset for rank in found))),
        )
        for entry in new
    }


def move_payloads(folder: Folder, ticket: str, manifest: Manifest) -> None:
    """Moves the ranks' files of a save to where its objects are looked for; raises OSError, and may be tried again."""
    if not manifest.new_objects:
        return
    for rank in range(manifest.ranks):
        staged, moved = _paths(folder, ticket, rank)
        if staged.exists():  # else an earlier attempt has moved it
            folder.files.rename(staged, moved)
    folder.files.sync_folder(folder.payloads)


def _paths(folder: Folder, ticket: str, rank: int) -> tuple[Path, Path]:
    """Returns where a rank's file of an open save is, and where it goes."""
    save = Folder.ticket_save(ticket)
    assert save is not None
    return folder.staging / ticket / f"{rank}.safetensors", folder.payload_path(save, rank)
