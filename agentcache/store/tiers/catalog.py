"""What one process knows of a store folder: its versions, their objects and its open saves, brought up to date when asked."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agentcache.store.tiers.folder import Folder
from agentcache.store.tiers.ledger import Holder, Ledger
from agentcache.store.tiers.manifest import Manifest, ObjectEntry
from agentcache.store.tiers.outcomes import Refused, VersionInfo

__all__ = ["Catalog", "Draft", "Place"]


class Place(NamedTuple):
    """Where an object's payloads lie: in the files of a save, for each rank at an offset. `ObjectEntry.place` as a value."""

    save: str
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, entry: ObjectEntry) -> Place:
        """Returns the place of a stored object; raises ValueError when it is malformed."""
        save, _, offsets = entry.place.partition(":")
        place = cls(save, tuple(int(offset) for offset in offsets.split(",")))
        if len(place.offsets) != len(entry.parts) or str(place) != entry.place or min(place.offsets) < 0:
            raise ValueError(f"{entry.place!r} is no place")
        if Folder.payload_save(f"{save}.0.safetensors") is None:
            raise ValueError(f"{entry.place!r} names no save")
        return place

    def __str__(self) -> str:
        return f"{self.save}:{','.join(map(str, self.offsets))}"


class Draft(NamedTuple):
    """An open save: what it will be, and how many bytes of payloads it has reserved."""

    manifest: Manifest
    reserve_bytes: int

    def encode(self) -> bytes:
        """Returns what the draft's file holds."""
        return b"%d\n" % self.reserve_bytes + self.manifest.encode()

    @classmethod
    def decode(cls, data: bytes) -> Draft | None:
        """Returns the draft of these bytes, or None when they are none."""
        reserve, _, rest = data.partition(b"\n")
        manifest = Manifest.decode(rest)
        if isinstance(manifest, Refused) or not (reserve.isdigit() and len(reserve) < 20):
            return None
        try:
            for entry in manifest.objects:
                if entry.parts:
                    Place.of(entry)
        except ValueError:
            return None
        return cls(manifest, int(reserve))


class Catalog:
    """A folder's mirror. The caller serialises access.

    Args:
        folder: The folder.
        policy: Name of the eviction policy.
    """

    def __init__(self, folder: Folder, policy: str) -> None:
        self.folder = folder
        self.ledger = Ledger(policy)
        self.files: dict[str, str] = {}
        """File of each version, by its name."""
        self.unreadable: dict[str, Refused] = {}
        """Files that hold no version, and why."""
        self.saves: dict[str, Draft] = {}
        """Open saves of every process, by ticket."""
        self.live: Counter[str] = Counter()
        """Objects that are kept, by the save whose files they lie in."""
        self.clock = 0
        self.latest_sequence = 0
        self._synced: int | None = None

    def distrust(self) -> None:
        """Makes the next `refresh` look into the folder: a change failed half-way."""
        self._synced = None

    def reread(self) -> None:
        """Reads every manifest anew: one that was whole may be damaged now; raises OSError."""
        for name in [*self.files]:
            self.remove(name)
        self.unreadable.clear()
        self.distrust()
        self.refresh()

    def refresh(self) -> None:
        """Takes in the versions that were made and removed since the last call; raises OSError."""
        before = self.folder.generation()
        again = {file for file, bad in self.unreadable.items() if bad.kind == "unavailable"}
        if before is not None and before == self._synced and not again:
            return
        names = set(os.listdir(self.folder.versions))
        known = {*self.files.values(), *self.unreadable}
        for gone in known - names:
            found = Folder.manifest_name(gone)
            if self.unreadable.pop(gone, None) is None and found is not None:
                self.remove(found[0])
        for new in sorted(
            (names - known) | (again & names), key=lambda name: (Folder.manifest_name(name) or ("", 0))[1]
        ):
            self._read(new)  # oldest first: a later one cannot claim its objects
        after = self.folder.generation()
        self._synced = after if after == before else None

    def own_change(self) -> None:
        """Says that the last change of the folder was made by the caller and is in this catalog already."""
        self._synced = self.folder.generation()

    def _read(self, file_name: str) -> None:
        path = self.folder.versions / file_name
        try:
            data = path.read_bytes()
            last_use, bonus = divmod(path.stat().st_mtime_ns, 10**9)
        except FileNotFoundError:
            return
        except OSError as error:  # one bad sector, or a folder in its place: the other versions are served
            self.unreadable[file_name] = Refused(
                f"its manifest cannot be read: {error.strerror or error}", "unavailable"
            )
            return
        made = self.decode(file_name, data)
        if isinstance(made, Manifest) and made.name in self.files:  # saved once more while the first could not be read
            made = Refused("there is another manifest of this version", "corrupt")
        if isinstance(made, Refused):
            self.unreadable[file_name] = made
        else:
            self.unreadable.pop(file_name, None)
            self.add(made, max(last_use, 0), bonus)

    def decode(self, file_name: str, data: bytes) -> Manifest | Refused:
        """Returns the manifest in a file of that name, sealed and placed, or why there is none."""
        manifest = Manifest.decode(data)
        if isinstance(manifest, Refused):
            return manifest
        if (manifest.name, manifest.sequence) != Folder.manifest_name(file_name):
            return Refused("the manifest is another version's", "corrupt")
        for entry in manifest.objects:
            record = self.ledger.records.get(entry.key)
            if record is None:
                try:
                    Place.of(entry)
                except ValueError as error:
                    return Refused(f"the manifest is malformed: {error}", "corrupt")
            elif record.entry != entry or record.namespace != manifest.namespace:
                return Refused(f"object {entry.key} is another one in another version", "corrupt")
        return manifest

    def add(self, manifest: Manifest, last_use: int, bonus: int = 0) -> None:
        """Adds a version."""
        name = manifest.name
        holder = Holder(
            name,
            manifest.namespace,
            manifest.cost_bytes,
            tuple(entry.key for entry in manifest.objects),
            manifest.sequence,
            last_use + bonus,
            what=manifest.info(),
        )
        self.files[name] = self.folder.manifest_path(name, manifest.sequence).name
        self.clock = max(self.clock, last_use)
        self.latest_sequence = max(self.latest_sequence, manifest.sequence)
        self._keep(holder, manifest.objects)

    def _keep(self, holder: Holder, entries: Sequence[ObjectEntry]) -> None:
        for entry in self.ledger.add(holder, entries):
            self.live[Place.of(entry).save] += 1

    def remove(self, name: str) -> list[tuple[Place, ObjectEntry]]:
        """Removes a version or an open save; returns the objects that went with it and where they lie."""
        self.files.pop(name, None)
        self.saves.pop(name, None)
        gone = [(Place.of(entry), entry) for entry in self.ledger.remove(name)]
        for place, _ in gone:
            self.live[place.save] -= 1
            if not self.live[place.save]:
                del self.live[place.save]
        return gone

    def open_save(self, ticket: str, draft: Draft) -> None:
        """Adds an open save: it keeps what it shares and the bytes that it reserved."""
        inherited = [entry for entry in draft.manifest.objects if entry.parts]
        holder = Holder(
            ticket,
            draft.manifest.namespace,
            draft.manifest.cost_bytes + draft.reserve_bytes,
            tuple(entry.key for entry in inherited),
            pins=1,
        )
        self._keep(holder, inherited)
        self.saves[ticket] = draft

    def tick(self) -> int:
        """Returns the time of one more use: a counter that processes share, whatever the wall clock does."""
        self.clock = max(self.clock, self.folder.clock()) + 1
        self.folder.set_clock(self.clock)
        return self.clock

    def score_on_disk(self, holder: Holder) -> int:
        """Returns a version's score as the last user of any process left it; raises OSError."""
        last_use, bonus = divmod((self.folder.versions / self.files[holder.name]).stat().st_mtime_ns, 10**9)
        self.clock = max(self.clock, last_use)
        return last_use + bonus

    def infos(self) -> Iterator[VersionInfo]:
        """Yields a line for each version."""
        for name in self.files:
            yield self.ledger.holders[name].what
