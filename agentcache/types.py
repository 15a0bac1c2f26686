"""The values that every part of agentcache passes around: spans, diffs and revision kinds. Pure Python, no torch, no vLLM.

Letters used everywhere: `P` exact common prefix, `X` fresh middle tokens (always computed), `S` aligned suffix, `R` the part
of S that is recomputed, `F` the part of S that is reused, `N` the new turn after the last aligned token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "AlignedRun",
    "Boundary",
    "BoundaryKind",
    "PromptDiff",
    "RevisionKind",
    "Run",
    "complement",
    "merge_runs",
    "run_tokens",
]


class Run(NamedTuple):
    """A half-open span `[start, stop)` of token positions."""

    start: int
    stop: int


class AlignedRun(NamedTuple):
    """A span of tokens that is identical in an old and in a new version."""

    old_start: int
    new_start: int
    length: int

    @property
    def shift(self) -> int:
        """How far the span moved, in tokens: new position minus old position."""
        return self.new_start - self.old_start

    @property
    def new_stop(self) -> int:
        """The first new position after the span."""
        return self.new_start + self.length

    @property
    def old_stop(self) -> int:
        """The first old position after the span."""
        return self.old_start + self.length


class RevisionKind(StrEnum):
    """Why a version differs from its parent."""

    FIRST = "first"
    IDENTICAL = "identical"
    APPEND = "append"
    TOOL_RESULT = "tool_result"
    SUMMARISATION = "summarisation"
    MEMORY = "memory"
    TRUNCATION = "truncation"
    RETOKENISATION = "retokenisation"
    OTHER = "other"


class BoundaryKind(StrEnum):
    """What a boundary encloses."""

    MESSAGE = "message"
    TOOL_RESULT = "tool_result"
    DOCUMENT = "document"


class Boundary(NamedTuple):
    """A unit of the prompt that an edit lies in: a message, a tool result or a document; positions are tokens."""

    kind: BoundaryKind
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PromptDiff:
    """The aligned spans between two token sequences.

    Attributes:
        old_len: Tokens in the old sequence.
        new_len: Tokens in the new sequence.
        aligned: Token-identical spans, ascending and disjoint in the new sequence. The old side may go backwards (a moved
            span). The first one starts at (0, 0) when there is a common prefix.
    """

    old_len: int
    new_len: int
    aligned: tuple[AlignedRun, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for run in self.aligned:
            if run.length <= 0 or run.new_start < end or run.old_start < 0:
                raise ValueError(f"aligned runs must be non-empty, ascending and disjoint in the new ids, got {run}")
            if run.new_stop > self.new_len or run.old_stop > self.old_len:
                raise ValueError(f"{run} reaches beyond {self.old_len} old or {self.new_len} new tokens")
            end = run.new_stop

    @property
    def prefix(self) -> int:
        """|P|: the tokens before the first difference."""
        first = self.aligned[0] if self.aligned else None
        return first.length if first is not None and first.old_start == 0 and first.new_start == 0 else 0

    @property
    def suffix(self) -> tuple[AlignedRun, ...]:
        """S: the aligned spans after the first difference."""
        return self.aligned[1:] if self.prefix else self.aligned

    @property
    def aligned_end(self) -> int:
        """The new position after the last aligned token; what follows is the new turn N."""
        return self.aligned[-1].new_stop if self.aligned else 0

    @property
    def fresh(self) -> tuple[Run, ...]:
        """All spans of the new sequence that no aligned span covers (X and N), ascending."""
        return complement((Run(r.new_start, r.new_stop) for r in self.aligned), self.new_len)

    @property
    def moved(self) -> tuple[AlignedRun, ...]:
        """The aligned spans whose old positions lie before those of an earlier aligned span."""
        out, furthest = [], 0
        for run in self.aligned:
            if run.old_start < furthest:
                out.append(run)
            furthest = max(furthest, run.old_stop)
        return tuple(out)

    @property
    def is_append(self) -> bool:
        """Whether the new sequence is the whole old one plus more tokens."""
        return self.prefix == self.old_len

    def apply(self, old_ids: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[int]:
        """Returns the new ids rebuilt from the old ones and the tokens of each fresh span, in order."""
        pieces: list[tuple[int, Sequence[int]]] = [
            (r.new_start, old_ids[r.old_start : r.old_stop]) for r in self.aligned
        ]
        pieces += [(run.start, tokens) for run, tokens in zip(self.fresh, new_tokens, strict=True)]
        return [token for _, piece in sorted(pieces, key=lambda p: p[0]) for token in piece]


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Where one chat message stands in a rendered prompt.

    Attributes:
        start: First token.
        stop: First token after the message.
        role: `system`, `user`, `assistant` or `tool`.
        content_hash: Hex digest of the message's role, content, tool calls and tool call id.
        message_id: The framework's id, when it gave one.
        tags: Free labels of the integration, e.g. `lc_source`.
    """

    start: int
    stop: int
    role: str
    content_hash: str
    message_id: str | None = None
    tags: tuple[str, ...] = field(default=())


def merge_runs(runs: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Returns the union of half-open spans as ascending, disjoint, non-touching runs."""
    out: list[Run] = []
    for start, stop in sorted(r for r in runs if r[1] > r[0]):
        if out and start <= out[-1].stop:
            out[-1] = Run(out[-1].start, max(out[-1].stop, stop))
        else:
            out.append(Run(start, stop))
    return tuple(out)


def complement(runs: Iterable[tuple[int, int]], stop: int, start: int = 0) -> tuple[Run, ...]:
    """Returns the spans of `[start, stop)` that no run covers, ascending."""
    out: list[Run] = []
    at = start
    for a, b in merge_runs(runs):
        if a >= stop:
            break
        if a > at:
            out.append(Run(at, a))
        at = max(at, b)
    if at < stop:
        out.append(Run(at, stop))
    return tuple(out)


def run_tokens(runs: Iterable[tuple[int, int]]) -> int:
    """Returns how many tokens disjoint runs cover."""
    return sum(b - a for a, b in runs)


def clip_runs(runs: Iterable[tuple[int, int]], start: int, stop: int) -> Iterator[Run]:
    """Yields the parts of runs that lie inside `[start, stop)`."""
    for a, b in runs:
        low, high = max(a, start), min(b, stop)
        if high > low:
            yield Run(low, high)
