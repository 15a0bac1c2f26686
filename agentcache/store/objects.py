"""The objects that the versions of a checkpoint index share: who points at them, what they take, which became free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentcache.store.extents import OBJECT_TOKENS, Extent
from agentcache.store.version import BlockObject, Version

__all__ = ["ObjectTable"]


class ObjectTable(Mapping[int, BlockObject]):
    """Objects by id. One is here from `add` on, until no version points at it or its payload is lost.

    Attributes:
        size_bytes: Of all payloads.
        pinned_bytes: Of those that a pinned version points at.
        dropped: Objects that became free and were not taken yet, in that order.
    """

    def __init__(self) -> None:
        self.size_bytes = self.pinned_bytes = 0
        self.dropped: list[int] = []
        self._blocks: dict[int, BlockObject] = {}
        self._keys: dict[str, int] = {}

    def __getitem__(self, object_id: int) -> BlockObject:
        return self._blocks[object_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def by_key(self, keys: Iterable[str]) -> dict[str, BlockObject]:
        """Returns those of these keys that are here, with their objects."""
        return {key: self._blocks[self._keys[key]] for key in keys if key in self._keys}

    def of(self, version: Version) -> list[BlockObject]:
        """Returns the objects that a version points at, each once."""
        return [self._blocks[object_id] for object_id in {extent.object_id for extent in version.extents}]

    # -- coming and going ----------------------------------------------------------------------------------------------

    def add(self, block: BlockObject) -> None:
        """Adds an object that nobody uses yet."""
        self._blocks[block.object_id] = block
        self._keys[block.key] = block.object_id
        self.size_bytes += block.size_bytes

    def use(self, version: Version) -> None:
        """Notes that a version points at its objects."""
        for block in self.of(version):
            block.users.add(version)

    def release(self, version: Version) -> None:
        """Takes back a version's references; what only it pointed at becomes free."""
        for block in self.of(version):
            block.users.remove(version)
            if not block.users:
                self._forget(block)

    def pin(self, version: Version) -> None:
        """Counts a version that was not pinned among those that keep their objects."""
        for block in self.of(version):
            block.pinned += 1
            if block.pinned == 1:
                self.pinned_bytes += block.size_bytes

    def unpin(self, version: Version) -> None:
        """Takes back what `pin` has counted."""
        for block in self.of(version):
            block.pinned -= 1
            if block.pinned == 0:
                self.pinned_bytes -= block.size_bytes

    def lose(self, object_ids: Iterable[int]) -> list[Version]:
        """Forgets objects whose payloads are lost, and their rows in every version; returns the versions."""
        lost = {object_id for object_id in object_ids if object_id in self._blocks}
        affected: dict[Version, None] = {}
        for object_id in sorted(lost):
            block = self._blocks[object_id]
            affected.update(dict.fromkeys(block.users))
            if block.pinned:
                self.pinned_bytes -= block.size_bytes
            self._forget(block)
        for version in affected:
            version.extents = tuple(extent for extent in version.extents if extent.object_id not in lost)
        return [*affected]

    def take_dropped(self) -> tuple[int, ...]:
        """Returns the objects that became free since the last call."""
        dropped, self.dropped = tuple(self.dropped), []
        return dropped

    def _forget(self, block: BlockObject) -> None:
        del self._blocks[block.object_id]
        del self._keys[block.key]
        self.dropped.append(block.object_id)
        self.size_bytes -= block.size_bytes

    # -- what is known of them -----------------------------------------------------------------------------------------

    def settle(self, object_id: int, size_bytes: int, tag: str, *, lossless: bool) -> None:
        """Notes what was really stored of a new object: at most the bytes that were reserved for it."""
        block = self._blocks.get(object_id)
        if block is None:
            return  # its version was dropped meanwhile
        saved = block.size_bytes - size_bytes
        assert saved >= 0, f"object {object_id} takes {size_bytes} bytes, {block.size_bytes} were reserved"
        block.size_bytes, block.tag, block.lossless = size_bytes, tag, lossless
        self.size_bytes -= saved
        if block.pinned:
            self.pinned_bytes -= saved

    def note_parts(self, parts: Mapping[str, tuple[Any, ...]]) -> None:
        """Notes, by key, what a tier below keeps of objects; those that are gone from here are ignored."""
        for key, block in self.by_key(parts).items():
            block.parts = parts[key]

    def trusted(self, object_id: int) -> bool:
        """Whether an object holds, bit by bit, rows of a full prefill of the version that computed them."""
        block = self._blocks[object_id]
        return block.exact and block.lossless

    def trusted_end(self, version: Version) -> int:
        """Returns how many leading rows are exact and stored as exact ones; rows that were lost do not end them.

        An exact row stands where it was computed: one that was moved is none, whatever a stored version says.
        """
        others = (e.position for e in version.extents if not self.trusted(e.object_id) or self._moved(e))
        return min(version.exact_end, next(others, version.exact_end))

    def _moved(self, extent: Extent) -> bool:
        return self._blocks[extent.object_id].source_position + extent.offset != extent.position

    def check(self) -> None:
        """Raises AssertionError when keys, sizes, pins or byte counts are wrong, or a free object is in use."""
        assert self._keys == {block.key: object_id for object_id, block in self._blocks.items()}, "wrong keys"
        for object_id, block in self._blocks.items():
            assert block.object_id == object_id
            assert 0 < block.tokens <= OBJECT_TOKENS, object_id
            assert block.pinned == sum(version.pins > 0 for version in block.users), object_id
        assert not set(self.dropped) & set(self._blocks), "a dropped object is in use"
        assert self.size_bytes == sum(block.size_bytes for block in self._blocks.values())
        assert self.pinned_bytes == sum(block.size_bytes for block in self._blocks.values() if block.pinned)
