"""The graph of versions, one row a version: which lane each stands in, and which lanes pass by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Lane", "lay_lanes"]


@dataclass(frozen=True, slots=True)
class Lane:
    """A version's row in the graph.

    ```
    ●        lane 0, no parent above
    ●─╮      lane 0, from above, forks (1,): a child that is not the next of its line leaves to lane 1
    │ ●      lane 1, through (0,)
    ●        lane 0
    ```

    Attributes:
        lane: Its own lane.
        above: Whether a line comes from above in its lane.
        below: Whether its line goes on below, in its lane.
        through: Other lanes whose lines pass by.
        forks: Lanes that leave it to the side and go on below.
        fork: Whether it is such a child itself.
    """

    lane: int
    above: bool
    below: bool
    through: tuple[int, ...]
    forks: tuple[int, ...]
    fork: bool


def lay_lanes(versions: Sequence[tuple[str, str | None, str]]) -> dict[str, Lane]:
    """Returns each version's place in the graph.

    Args:
        versions: Id, parent and episode, in the order of the rows; a parent that is not among the rows before is none.
    """
    row = {version: at for at, (version, _, _) in enumerate(versions)}
    children: dict[str, list[str]] = {version: [] for version in row}
    episode = {version: name for version, _, name in versions}
    for version, parent, _ in versions:
        if parent is not None and row.get(parent, len(row)) < row[version]:
            children[parent].append(version)
    heir = {
        version: next((c for c in below if episode[c] == episode[version]), below[0] if below else None)
        for version, below in children.items()
    }
    lane: dict[str, int] = {}
    last: list[int] = []  # the last row of each lane that is taken
    out: dict[str, Lane] = {}
    parents = {child: parent for parent, below in children.items() for child in below}

    def take(first: int, stop: int) -> int:
        free = next((at for at, end in enumerate(last) if end < first), len(last))
        if free == len(last):
            last.append(stop)
        last[free] = stop
        return free

    for version, at in row.items():
        if version not in lane:
            lane[version] = take(at, at)
        own = lane[version]
        for child in children[version]:
            if child == heir[version]:
                lane[child] = own
                last[own] = row[child]
            else:
                lane[child] = take(at, row[child])
    spans = [(lane[child], row[parent], row[child]) for child, parent in parents.items()]
    passing: dict[int, list[tuple[int, int]]] = {}
    for taken, begin, end in spans:
        for at in range(begin + 1, end):
            passing.setdefault(at, []).append((taken, end))
    for version, at in row.items():
        next_ = heir[version]
        fork = version in parents and heir[parents[version]] != version
        out[version] = Lane(
            lane=lane[version],
            above=version in parents,
            below=next_ is not None,
            through=tuple(sorted({taken for taken, _ in passing.get(at, ())})),
            forks=tuple(lane[child] for child in children[version] if child != next_),
            fork=fork,
        )
    return out
