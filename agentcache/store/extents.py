"""Extents: which rows of which stored object stand where in a version. Pure functions over ascending, disjoint tuples.

```
version     position  0 ........ 300 .. 320 ........ 1010
extents               [object 1 ][obj 9][object 1, shifted ]
                       offset 0   0      offset 310
```
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from agentcache.types import AlignedRun, Run

__all__ = ["OBJECT_TOKENS", "Extent", "LoadExtent", "NewObject", "cut_objects", "merge_extents", "overlap", "relocate"]

OBJECT_TOKENS = 256
"""Most rows of one object: so many that a version has few objects, so few that a row in use keeps little else alive."""


class Extent(NamedTuple):
    """Rows `[offset, offset + length)` of an object are rows `[position, position + length)` of a version.

    `generation` counts the edits before these rows that they survived without being recomputed.
    """

    object_id: int
    offset: int
    length: int
    position: int
    generation: int = 0

    @property
    def stop(self) -> int:
        """The first position after the extent."""
        return self.position + self.length


class LoadExtent(NamedTuple):
    """Rows `[offset, offset + length)` of an object are to be written at `[position, position + length)` of a request.

    `shift` is how far the keys turn, in tokens: the new position minus the one that the rows were computed at.
    """

    object_id: int
    offset: int
    length: int
    position: int
    shift: int


class NewObject(NamedTuple):
    """Rows `[start, stop)` of a finished request become the payload of a new object."""

    object_id: int
    start: int
    stop: int


def overlap(extents: Sequence[Extent], start: int, stop: int) -> Iterator[Extent]:
    """Yields the parts of extents that lie inside `[start, stop)`."""
    if start >= stop:
        return
    for at in range(bisect_right(extents, start, key=lambda extent: extent.position + extent.length), len(extents)):
        object_id, offset, length, position, generation = extents[at]
        if position >= stop:
            return
        low, high = max(start, position), min(stop, position + length)
        yield Extent(object_id, offset + low - position, high - low, low, generation)


def relocate(extents: Sequence[Extent], runs: Iterable[AlignedRun], edit: int) -> Iterator[Extent]:
    """Yields the rows that runs take over from an old version, at their new positions.

    Args:
        extents: The old version's.
        runs: Old rows and their new positions.
        edit: Length of the common prefix. A run inside it survived no edit; rows of all others age by one generation.
            No run crosses it unmoved, for the tokens at the edit differ.
    """
    for run in runs:
        older = 0 if run.shift == 0 and run.new_start < edit else 1
        for part in overlap(extents, run.old_start, run.old_stop):
            yield part._replace(position=part.position + run.shift, generation=part.generation + older)


def merge_extents(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Returns the extents by ascending position with those joined that continue each other in one object."""
    out: list[Extent] = []
    for extent in sorted(extents, key=lambda extent: extent.position):
        last = out[-1] if out else None
        if (
            last is not None
            and last.object_id == extent.object_id
            and last.offset + last.length == extent.offset
            and last.stop == extent.position
            and last.generation == extent.generation
        ):
            out[-1] = last._replace(length=last.length + extent.length)
        else:
            out.append(extent)
    return tuple(out)


def cut_objects(runs: Iterable[Run], exact_end: int) -> Iterator[Run]:
    """Yields runs cut to `OBJECT_TOKENS` rows and at `exact_end`, so that an object is wholly exact or wholly not."""
    for start, stop in runs:
        at = start
        while at < stop:
            end = min(at + OBJECT_TOKENS, stop)
            if at < exact_end < end:
                end = exact_end
            yield Run(at, end)
            at = end
