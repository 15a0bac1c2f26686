"""Several versions seen as one: a request's parent and the further versions and chunks that its rows may come from.

```
token ids   parent's ids | gap | first source's ids | gap | second source's ids
rows        parent's     |  -  | the source's, at moved positions
exact_end   parent's: rows of a source stand in another context than they were computed in
```
Everything that reads a parent (diff, policies, planner, loads, saves) reads such a composition instead. Objects keep the
position that they were computed at, so keys turn by the right angle by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from agentcache.store.scores import Codes
from agentcache.store.version import Version
from agentcache.types import AlignedRun

__all__ = ["GAP", "Composition", "Part", "compose"]

GAP = -1
"""The token between two parts. No prompt has it: no span of equal tokens crosses it, nor goes on from the base into a source."""


class Part(NamedTuple):
    """A version whose row 0 is row `offset` of the composition."""

    version: Version
    offset: int

    @property
    def stop(self) -> int:
        """The first row after it."""
        return self.offset + len(self.version.token_ids)


@dataclass(frozen=True, slots=True)
class Composition:
    """Versions of one namespace, seen as one.

    Attributes:
        token_ids: `[T]` int32, read-only, of all parts that there were, with gaps.
        parts: Ascending. The first is the base at row 0: the parent, or what stands for it.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    parts: tuple[Part, ...]

    @property
    def base(self) -> Version:
        """The version whose leading rows may be exact ones of a prompt."""
        return self.parts[0].version

    @property
    def sources(self) -> tuple[Version, ...]:
        """All versions but the base."""
        return tuple(part.version for part in self.parts[1:])

    @property
    def versions(self) -> tuple[Version, ...]:
        """The base and the sources."""
        return tuple(part.version for part in self.parts)

    @property
    def alive(self) -> tuple[Version, ...]:
        """Those of the versions that were not dropped."""
        return tuple(version for version in self.versions if version.state != "dropped")

    @property
    def source_start(self) -> int:
        """The first row of a source."""
        return len(self.base.token_ids) + 1

    def used_by(self, restore: Iterable[AlignedRun], *, keep_base: bool = True) -> Composition:
        """Returns the composition of those parts that rows are restored from, and the base; rows keep their places."""
        starts = np.array([run.old_start for run in restore], dtype=np.int64)
        used = [part for part in self.parts if ((starts >= part.offset) & (starts < part.stop)).any()]
        if keep_base and self.parts[0] not in used:
            used.insert(0, self.parts[0])
        return Composition(self.token_ids, tuple(used))

    def view(self) -> Version:
        """Returns the parts as one version with the rows that they have now; those of dropped versions are missing.

        It is no version of the index: what must be pinned, touched or counted are the parts. A base alone is itself.
        """
        base = self.base
        if len(self.parts) == 1:
            return base
        here = [part for part in self.parts if part.version.state != "dropped"]
        states = {part.version.state for part in here}
        return Version(
            version_id=base.version_id,
            namespace=base.namespace,
            group=base.group,
            parent=base.parent,
            token_ids=self.token_ids,
            exact_end=base.exact_end,
            salts=base.salts,
            extents=tuple(
                extent._replace(position=extent.position + offset) for part, offset in here for extent in part.extents
            ),
            state="saving" if "saving" in states else "committed" if states else "dropped",
            attention=self._attention(here),
        )

    def _attention(self, here: Sequence[Part]) -> Codes | None:
        """Returns the parts' scores, each relative to its own version's largest; None when one was not measured."""
        codes = np.zeros(len(self.token_ids), dtype=np.uint8)
        for version, offset in here:
            if version.attention is None:
                return None
            codes[offset : offset + len(version.attention)] = version.attention
        return codes


def compose(base: Version, sources: Iterable[Version] = ()) -> Composition:
    """Returns versions of one namespace as one, the base at row 0; a version that comes twice is taken once.

    Args:
        base: The parent, or the source that shares the longest prefix with the prompt.
        sources: Versions that rows after that prefix may come from too.
    """
    versions = [*dict.fromkeys((base, *sources))]
    assert all(version.namespace == base.namespace for version in versions), "sources of another namespace"
    if len(versions) == 1:
        return Composition(base.token_ids, (Part(base, 0),))
    gap = np.array([GAP], dtype=np.int32)
    pieces: list[np.ndarray[Any, np.dtype[np.int32]]] = []
    parts: list[Part] = []
    at = 0
    for version in versions:
        parts.append(Part(version, at))
        pieces += [version.token_ids, gap]
        at += len(version.token_ids) + 1
    token_ids = np.concatenate(pieces[:-1])
    token_ids.flags.writeable = False
    return Composition(token_ids, tuple(parts))
