"""Which version the checkpoint index evicts next."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from agentcache.store.version import Version

__all__ = ["EvictionOrder"]

_MOST_EXPECTED: Final = 1024  # groups: what was announced before them counts as any other

Group = tuple[str, str]  # namespace and name


class EvictionOrder:
    """Versions by group: those of the least recently used group go first, expected groups last, oldest first within a group."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Group, dict[Version, None]] = OrderedDict()  # least recently used first
        self._expected: OrderedDict[Group, None] = OrderedDict()  # groups that will be resumed soon

    def __len__(self) -> int:
        """Returns how many groups there are."""
        return len(self._groups)

    def groups(self) -> list[list[Version]]:
        """Returns the versions of each group, least recently used groups first."""
        return [[*group] for group in self._groups.values()]

    def of_group(self, namespace: str, group: str) -> list[Version]:
        """Returns the versions of a group, oldest first."""
        return [*self._groups.get((namespace, group), ())]

    def add(self, version: Version) -> None:
        """Adds a version as the newest of its group."""
        self._groups.setdefault((version.namespace, version.group), {})[version] = None

    def remove(self, version: Version) -> None:
        """Removes a version, and its group with the last one."""
        name = (version.namespace, version.group)
        group = self._groups[name]
        del group[version]
        if not group:
            del self._groups[name]
            self._expected.pop(name, None)

    def use(self, namespace: str, group: str) -> None:
        """Makes a group the most recently used, if there is one."""
        if (namespace, group) in self._groups:
            self._groups.move_to_end((namespace, group))

    def resume(self, namespace: str, group: str) -> None:
        """Makes a group the most recently used; a resume that was expected has come."""
        self._groups.move_to_end((namespace, group))
        self._expected.pop((namespace, group), None)

    def expect(self, namespace: str, group: str) -> None:
        """Notes that a group will be resumed soon."""
        self._expected[namespace, group] = None
        self._expected.move_to_end((namespace, group))
        if len(self._expected) > _MOST_EXPECTED:
            self._expected.popitem(last=False)

    def next(self) -> Version:
        """Returns the version that is evicted next; one must not be pinned."""
        # Passes over pinned versions and expected groups only, and those are few.
        free = (version for group in self._groups.values() for version in group if not version.pins)
        rest = (
            version
            for name, group in self._groups.items()
            if name not in self._expected
            for version in group
            if not version.pins
        )
        return next(rest, None) or next(free)

    def check(self) -> None:
        """Raises AssertionError when a group is empty, or one that is gone is expected."""
        assert all(self._groups.values()), "an empty group"
        assert self._expected.keys() <= self._groups.keys(), "a group that is gone is expected"
