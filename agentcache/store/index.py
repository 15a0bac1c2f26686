"""The checkpoint index: the scheduler's half of the block store ("git for KV").

It is the authority over the byte budget, eviction and reference counts. The workers keep payloads by object id and
follow orders: gather the `NewObject`s of a save, read the `LoadExtent`s of a load, forget what `take_dropped` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from secrets import token_hex
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from agentcache.store.eviction import EvictionOrder
from agentcache.store.extents import (
    OBJECT_TOKENS,
    Extent,
    LoadExtent,
    NewObject,
    cut_objects,
    merge_extents,
    overlap,
    relocate,
)
from agentcache.store.integrity import check_index
from agentcache.store.objects import ObjectTable
from agentcache.store.scores import Codes
from agentcache.store.version import Adopted, BlockObject, IndexStats, Refusal, SavePlan, Version
from agentcache.types import AlignedRun, complement, run_tokens

__all__ = ["Adopted", "CheckpointIndex", "Refusal", "SavePlan", "Version"]


class CheckpointIndex:
    """Versions as extents of reference-counted objects, inside a byte budget.

    ```
               begin_save        commit                 drop, evict
    (nothing) ------------> saving ------> committed ----------------> dropped, freed
                              | abort_save, drop                         ^ the last unpin
                              +-----------------> dropped, still pinned -+
    ```

    Pinned bytes are those of pinned versions and their objects; all others can be evicted. Hence a save fits, after
    evictions, exactly when `pinned + needed <= budget`: the answer is known before anything changes.

    Args:
        bytes_per_token: Payload bytes of one row over all layers and ranks.
        budget_bytes: Most bytes of payloads and of versions' token ids.
    """

    def __init__(self, bytes_per_token: int, budget_bytes: int) -> None:
        assert bytes_per_token > 0, f"a row has bytes, got {bytes_per_token}"
        self.bytes_per_token = bytes_per_token
        self.budget_bytes = budget_bytes
        self._versions: dict[tuple[str, str], Version] = {}
        self._order = EvictionOrder()
        self._doomed: set[Version] = set()  # dropped, but still pinned
        self._objects = ObjectTable()
        self._ids = count(1)
        self._token_bytes = self._pinned_token_bytes = 0
        self._evictions = self._refusals = 0

    # -- saving --------------------------------------------------------------------------------------------------------

    def begin_save(
        self,
        version_id: str,
        namespace: str,
        group: str,
        parent: Version | None,
        token_ids: ArrayLike,
        computed: int,
        plan_restore: Sequence[AlignedRun],
        exact_end: int,
        salts: tuple[tuple[int, bytes], ...] = (),
        composed_of: Sequence[Version] = (),
    ) -> SavePlan | Refusal:
        """Registers a version that points at its parent's rows where they were restored; returns what else to gather.

        Every row of `[0, computed)` that no restored row of the parent covers becomes part of a new object, also a row
        that was to be restored but whose object was lost. Evicts what the budget asks for: unpinned versions, those of
        the least recently used group first, oldest first within a group, expected groups last; never a parent whose rows
        it shares.

        Args:
            version_id: New in its namespace.
            namespace: Tenant.
            group: Eviction group, e.g. the episode.
            parent: The version that rows were restored from, of the same namespace.
            token_ids: `[T]` ids of the version.
            computed: Leading rows that have KV.
            plan_restore: Parent rows that were restored and not recomputed, ascending in the new version.
            exact_end: Leading rows that are those of a full prefill.
            salts: `(block index, salt)` of the block hashes.
            composed_of: The index's own versions when the parent is a view of several, see `store.compose`.

        Returns:
            The plan, or a refusal with nothing changed.
        """
        ids = np.array(token_ids, dtype=np.int32)
        ids.flags.writeable = False
        assert 0 <= computed <= len(ids), f"{computed} rows are computed of {len(ids)} tokens"
        if (namespace, version_id) in self._versions:
            return self._refuse(f"version {version_id!r} exists already; a version is created once")
        assert parent is None or parent.namespace == namespace, (
            f"{parent.key} is of another namespace than {namespace!r}"
        )
        source = parent if plan_restore else None
        assert source is not None or not plan_restore, "rows can only be shared with a parent"
        if source is not None and source.state != "committed":
            return self._refuse(f"parent {source.version_id!r}, whose rows it shares, was dropped or is not saved yet")

        held = () if source is None else composed_of or (source,)
        assert all(self._versions.get(shared.key) is shared for shared in held), "rows of versions that are not here"
        inherited = self._inherit(source, ids, computed, plan_restore) if source is not None else ()
        gathered = [*cut_objects(complement(((e.position, e.stop) for e in inherited), computed), exact_end)]
        needed = run_tokens(gathered) * self.bytes_per_token + ids.nbytes
        for shared in held:
            self.pin(shared)
        if self._pinned_bytes + needed > self.budget_bytes:
            reason = (
                f"{needed} bytes do not fit into the store: open loads and saves use {self._pinned_bytes} "
                f"of {self.budget_bytes}"
            )
            for shared in held:
                self.unpin(shared)
            return self._refuse(reason)

        self._order.use(namespace, group)
        evicted = self._make_room(needed)
        new = tuple(NewObject(next(self._ids), start, stop) for start, stop in gathered)
        for object_id, start, stop in new:
            size = (stop - start) * self.bytes_per_token
            self._objects.add(BlockObject(object_id, token_hex(16), stop - start, start, size, exact=stop <= exact_end))
        extents = merge_extents([*inherited, *(Extent(o, 0, stop - start, start) for o, start, stop in new)])
        version = Version(
            version_id=version_id,
            namespace=namespace,
            group=group,
            parent=parent.version_id if parent is not None else None,
            token_ids=ids,
            exact_end=min(exact_end, computed),
            salts=tuple(salts),
            extents=extents,
        )
        self._register(version)
        for shared in held:
            self.unpin(shared)
        return SavePlan(version, new, evicted)

    def adopt(
        self,
        stored: Version,
        extents: Iterable[tuple[str, int, int, int, int]],
        objects: Iterable[BlockObject],
    ) -> Adopted | Refusal:
        """Registers a version that a tier below keeps, sharing the objects that are here; returns which ones are not.

        Args:
            stored: The version without its extents; one that was not registered here is left as it is.
            extents: Its extents, with keys instead of object ids.
            objects: What they point at, with any object id.
        """
        if stored.key in self._versions:
            return self._refuse(f"version {stored.version_id!r} is here already")
        found = {block.key: block for block in objects}
        here = self._objects.by_key(found)
        if any(user.namespace != stored.namespace for block in here.values() for user in block.users):
            return self._refuse(f"version {stored.version_id!r} names an object of another namespace")
        if any(block.tokens > OBJECT_TOKENS for block in found.values()):
            return self._refuse(f"version {stored.version_id!r} has objects of more than {OBJECT_TOKENS} rows")
        if any((b.tokens, b.source_position) != (found[k].tokens, found[k].source_position) for k, b in here.items()):
            return self._refuse(f"version {stored.version_id!r} has another object of the same key")
        needed = sum(block.size_bytes for key, block in found.items() if key not in here)
        pinned = sum(block.size_bytes for block in here.values() if not block.pinned)
        if self._pinned_bytes + pinned + needed + stored.token_ids.nbytes > self.budget_bytes:
            return self._refuse(
                f"{needed} bytes of version {stored.version_id!r} do not fit into memory: open loads and saves use "
                f"{self._pinned_bytes} of {self.budget_bytes}"
            )
        ids = {key: block.object_id for key, block in here.items()}
        new = []
        for key, block in found.items():
            if key not in here:
                block.object_id = ids[key] = next(self._ids)
                new.append((block.object_id, key))
        stored.extents = merge_extents(Extent(ids[key], *rest) for key, *rest in extents)
        for block in here.values():  # not to be evicted to make room for the rest
            block.users.add(stored)
        self._make_room(needed + stored.token_ids.nbytes)
        for _, key in new:
            self._objects.add(found[key])
        self._register(stored)
        return Adopted(stored, tuple(new))

    def commit(self, version: Version, attention: Codes | None = None) -> bool:
        """Makes a saved version loadable; returns False, and frees it, when it was dropped meanwhile."""
        assert version.state != "committed", f"{version.key} is committed already"
        stored = version.state == "saving"
        if stored:
            version.state = "committed"
            version.attention = attention if attention is not None else version.attention
        self.unpin(version)
        return stored

    def settle(self, object_id: int, size_bytes: int, tag: str, *, lossless: bool) -> None:
        """Notes what the worker really stored of a new object: at most the bytes that were reserved for it."""
        self._objects.settle(object_id, size_bytes, tag, lossless=lossless)

    def note_parts(self, parts: Mapping[str, tuple[Any, ...]]) -> None:
        """Notes, by key, what a tier below keeps of objects; those that are gone from here are ignored."""
        self._objects.note_parts(parts)

    def trusted(self, object_id: int) -> bool:
        """Whether an object holds, bit by bit, rows of a full prefill of the version that computed them."""
        return self._objects.trusted(object_id)

    def trusted_end(self, version: Version) -> int:
        """Returns how many leading rows are exact and stored as exact ones; rows that were lost do not end them.

        An exact row stands where it was computed: one that was moved is none, whatever a stored version says.
        """
        return self._objects.trusted_end(version)

    def abort_save(self, version: Version) -> None:
        """Drops a version whose payloads could not be stored."""
        assert version.state != "committed", f"{version.key} is committed already"
        self.drop_version(version)
        self.unpin(version)

    # -- reading -------------------------------------------------------------------------------------------------------

    def lookup(self, namespace: str, version_id: str) -> Version | None:
        """Returns the version, saving or committed, of this namespace; None when it is unknown, evicted or dropped."""
        return self._versions.get((namespace, version_id))

    def load_plan(self, version: Version, restore: Iterable[AlignedRun], start_row: int = 0) -> list[LoadExtent]:
        """Returns what to copy for the restored rows at new positions `>= start_row`, in the order of `restore`.

        Rows whose objects were lost since `restore` was planned are left out: the caller recomputes what no extent
        covers.
        """
        out: list[LoadExtent] = []
        for run in restore:
            shift = run.shift
            for object_id, offset, length, old, _ in overlap(
                version.extents, max(run.old_start, start_row - shift), run.old_stop
            ):
                source = self._objects[object_id].source_position + offset
                out.append(LoadExtent(object_id, offset, length, old + shift, old + shift - source))
        return out

    def pin(self, version: Version) -> None:
        """Keeps a version and its payloads until `unpin`; pins count."""
        assert version.state != "dropped", f"{version.key} was dropped"
        version.pins += 1
        if version.pins == 1:
            self._pinned_token_bytes += version.token_ids.nbytes
            self._objects.pin(version)

    def unpin(self, version: Version) -> None:
        """Takes back one pin; a dropped version is freed with its last one."""
        assert version.pins > 0, f"{version.key} is not pinned"
        version.pins -= 1
        if version.pins == 0:
            self._pinned_token_bytes -= version.token_ids.nbytes
            self._objects.unpin(version)
            if version.state == "dropped":
                self._doomed.remove(version)
                self._free(version)

    def touch(self, version: Version) -> None:
        """Marks a version's group as the most recently used; a resume that was expected has come."""
        assert version.state != "dropped", f"{version.key} was dropped"
        self._order.resume(version.namespace, version.group)

    def expect(self, version: Version) -> None:
        """Notes that a version's group will be resumed soon: it is evicted after all that are not expected."""
        assert version.state != "dropped", f"{version.key} was dropped"
        self._order.expect(version.namespace, version.group)

    # -- dropping ------------------------------------------------------------------------------------------------------

    def drop_version(self, version: Version) -> None:
        """Makes a version unfindable and frees what only it uses, at once or with its last pin."""
        if version.state == "dropped":
            return
        version.state = "dropped"
        del self._versions[version.key]
        self._order.remove(version)
        if version.pins:
            self._doomed.add(version)
        else:
            self._free(version)

    def drop_group(self, namespace: str, group: str) -> None:
        """Drops all versions of a group."""
        for version in self._order.of_group(namespace, group):
            self.drop_version(version)

    def clear(self) -> None:
        """Drops all versions."""
        for version in [*self._versions.values()]:
            self.drop_version(version)

    def lose_objects(self, object_ids: Iterable[int]) -> list[Version]:
        """Forgets objects whose payloads are lost or corrupt; their rows are missing from now on.

        Returns:
            The versions that can still be found and now miss rows, by key.
        """
        affected = self._objects.lose(object_ids)
        return sorted((version for version in affected if version.state != "dropped"), key=lambda version: version.key)

    def take_dropped(self) -> tuple[int, ...]:
        """Returns the objects that became free since the last call: the workers' orders to forget them."""
        return self._objects.take_dropped()

    # -- looking -------------------------------------------------------------------------------------------------------

    def stats(self) -> IndexStats:
        """Returns the counters."""
        return {
            "versions": len(self._versions),
            "groups": len(self._order),
            "objects": len(self._objects),
            "bytes": self._objects.size_bytes,
            "token_bytes": self._token_bytes,
            "pinned_bytes": self._pinned_bytes,
            "budget_bytes": self.budget_bytes,
            "evictions": self._evictions,
            "refusals": self._refusals,
        }

    def check_integrity(self) -> None:
        """Recomputes references, byte counts and tilings from the extents and compares; raises AssertionError."""
        check_index(self)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _pinned_bytes(self) -> int:
        """What cannot be evicted now: pinned versions' token ids and their objects."""
        return self._pinned_token_bytes + self._objects.pinned_bytes

    def _inherit(
        self, source: Version, ids: np.ndarray, computed: int, restore: Sequence[AlignedRun]
    ) -> tuple[Extent, ...]:
        """Returns the parent's extents that a new version shares, below `computed`."""
        old = source.token_ids
        assert all(
            old[r.old_start : r.old_stop].tobytes() == ids[r.new_start : r.new_stop].tobytes() for r in restore
        ), f"restored rows of {source.key} have other tokens"
        runs = [r._replace(length=min(r.length, computed - r.new_start)) for r in restore if r.new_start < computed]
        both = min(len(ids), len(old))
        differs = old[:both] != ids[:both]
        edit = int(differs.argmax()) if differs.any() else both
        return merge_extents(relocate(source.extents, runs, edit))

    def objects_of(self, version: Version) -> list[BlockObject]:
        """Returns the objects that a version points at, each once."""
        return self._objects.of(version)

    def _register(self, version: Version) -> None:
        """Makes a version findable and pins it; its objects are here."""
        self._versions[version.key] = version
        self._order.add(version)
        self._objects.use(version)
        self._token_bytes += version.token_ids.nbytes
        self.pin(version)

    def _make_room(self, needed: int) -> tuple[int, ...]:
        """Evicts until `needed` bytes fit, which the caller has made sure is possible; returns the freed objects."""
        before = len(self._objects.dropped)
        while self._objects.size_bytes + self._token_bytes + needed > self.budget_bytes:
            self.drop_version(self._order.next())
            self._evictions += 1
        return tuple(self._objects.dropped[before:])

    def _free(self, version: Version) -> None:
        """Takes back a dropped version's references."""
        self._token_bytes -= version.token_ids.nbytes
        self._objects.release(version)

    def _refuse(self, reason: str) -> Refusal:
        self._refusals += 1
        return Refusal(reason)
