"""What the page shows: families of versions, their rows, stages and lanes, and the totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentcache.engine.wire import Recovery
from agentcache.labels import count_labels, format_labels
from agentcache.report.lanes import Lane, lay_lanes
from agentcache.report.log import Entry
from agentcache.types import complement

__all__ = ["LABELS", "STAGES", "Family", "Report", "Row", "Totals", "build_report"]

LABELS = ("P", "X", "R", "F", "N", "S")
"""`S` are aligned rows of which the log does not tell whether they were reused."""

STAGES = ("diff", "plan", "fetch", "restore", "select", "recompute", "rest")
"""Parts of the time to first token; `rest` is what is left: vLLM's own work and the way to and fro."""

_FEW = 64
"""Prefills of fewer tokens say little of how long a token takes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One version on the page.

    Attributes:
        entry: What the log tells of it.
        number: Its place in the log, from 0.
        labels: Which rows of the prompt were what; see `agentcache.labels` and `LABELS`.
        counts: Tokens of each label.
        precisions: How restored rows had been stored, in the same form; empty when it is not known.
        stages: Milliseconds of each stage; empty when the time to first token is not known.
        saved_tokens: Tokens that vLLM's prefix cache would have computed, and that were not.
        saved_ms: Estimate of the time that this saved; None when there is nothing to estimate it by, or nothing was saved.
        lane: Where it stands in the graph of versions.
    """

    entry: Entry
    number: int
    labels: str
    counts: dict[str, int]
    precisions: str
    stages: dict[str, float]
    saved_tokens: int
    saved_ms: float | None
    lane: Lane

    @property
    def ttft_ms(self) -> float:
        """Time to first token; 0 when it is not known."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over versions.

    Attributes:
        versions: How many.
        episodes: Of how many episodes.
        forks: Versions whose parent has an earlier child, or is another episode's.
        resumes: Versions that were recovered from another one.
        approximate: Of them, those whose KV is not that of a full prefill.
        prompt_tokens: Of all prompts.
        prefix_tokens: |P|.
        computed_tokens: X, R and N, and rows that were lost.
        saved_tokens: See `Row.saved_tokens`.
        saved_ms: Sum of the estimates; None when there is none.
        ttft_ms: Sum of the times to first token.
        checks: Results of the quality guard.
        strikes: Of them, those beyond the bound.
    """

    versions: int
    episodes: int
    forks: int
    resumes: int
    approximate: int
    prompt_tokens: int
    prefix_tokens: int
    computed_tokens: int
    saved_tokens: int
    saved_ms: float | None
    ttft_ms: float
    checks: int
    strikes: int

    @property
    def saved_share(self) -> float:
        """Of the tokens that vLLM's prefix cache would have computed, the share that was not."""
        return self.saved_tokens / max(self.saved_tokens + self.computed_tokens, 1)


@dataclass(frozen=True, slots=True)
class Family:
    """Episodes that forks connect.

    Attributes:
        episodes: Their ids, the oldest first.
        rows: Their versions in the order in which they were recorded.
        totals: Sums over them.
        lanes: How wide the graph is.
    """

    episodes: tuple[str, ...]
    rows: tuple[Row, ...]
    totals: Totals
    lanes: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page shows.

    Attributes:
        families: The oldest first.
        totals: Sums over them.
        token_ms: Milliseconds of prefill a token, by which time that was saved is estimated; None when nothing tells.
        token_requests: How many requests told that.
    """

    families: tuple[Family, ...] = ()
    totals: Totals = field(default_factory=lambda: _total([]))
    token_ms: float | None = None
    token_requests: int = 0


def build_report(entries: Sequence[Entry]) -> Report:
    """Returns what the page shows of a log."""
    full = [e.recovery for e in entries if e.recovery and e.recovery.ttft_ms and _computed(e.recovery) >= _FEW]
    full = [recovery for recovery in full if not recovery.reused_tokens]
    told = sum(map(_computed, full))
    token_ms = sum(recovery.ttft_ms or 0.0 for recovery in full) / told if told else None
    number = {entry.revised.version: at for at, entry in enumerate(entries)}
    families = []
    for members in _families(entries):
        lanes = lay_lanes([(e.revised.version, e.revised.parent, e.revised.episode) for e in members])
        rows = tuple(_row(e, number[e.revised.version], lanes[e.revised.version], token_ms) for e in members)
        episodes = tuple(dict.fromkeys(entry.revised.episode for entry in members))
        width = 1 + max(max((row.lane.lane, *row.lane.through)) for row in rows)
        families.append(Family(episodes, rows, _total(rows), width))
    return Report(tuple(families), _total([row for f in families for row in f.rows]), token_ms, len(full))


def _families(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Returns the entries by connected episodes: a version belongs to its parent's family."""
    of_episode: dict[str, list[Entry]] = {}
    of_version: dict[str, list[Entry]] = {}
    families: list[list[Entry]] = []
    for entry in entries:
        revised = entry.revised
        family = of_episode.get(revised.episode)
        if family is None and revised.parent is not None:
            family = of_version.get(revised.parent)
        if family is None:
            family = []
            families.append(family)
        family.append(entry)
        of_episode[revised.episode] = of_version[revised.version] = family
    return families


def _row(entry: Entry, number: int, lane: Lane, token_ms: float | None) -> Row:
    recovery, labels = entry.recovery, _labels(entry)
    saved = max(recovery.reused_tokens - recovery.lost_tokens, 0) if recovery else 0
    stages = _stages(recovery) if recovery else {}
    saved_ms = None
    if recovery and recovery.ttft_ms and saved:
        exact_ms = (recovery.estimate or {}).get("exact_ms")
        if exact_ms is None and token_ms is not None:
            exact_ms = token_ms * (_computed(recovery) + saved)
        saved_ms = None if exact_ms is None else exact_ms - recovery.ttft_ms
    return Row(
        entry=entry,
        number=number,
        labels=labels,
        counts=count_labels(labels),
        precisions=recovery.precisions if recovery else "",
        stages=stages,
        saved_tokens=saved,
        saved_ms=saved_ms,
        lane=lane,
    )


def _labels(entry: Entry) -> str:
    """Returns the report's labels of rows; of an older log, what the diff and the counts tell."""
    revised, recovery = entry.revised, entry.recovery
    if recovery and recovery.rows:
        return recovery.rows
    length = revised.new_len
    if recovery and not recovery.reused_tokens and not recovery.repair_tokens:
        kept = min(recovery.prefix_tokens, length)
        return format_labels([("P", 0, kept), ("N", kept, length)], length)
    aligned = [(run.new_start, run.new_stop) for run in revised.aligned]
    end = aligned[-1][1] if aligned else 0
    labels = [("P" if start < revised.prefix else "S", start, stop) for start, stop in aligned]
    labels += [("X", start, stop) for start, stop in complement(aligned, end)]
    return format_labels([*labels, ("N", end, length)], length)


def _stages(recovery: Recovery) -> dict[str, float]:
    """Returns the parts of the time to first token in milliseconds; they sum to it."""
    if not recovery.ttft_ms:
        return {}
    parts = {name: float(getattr(recovery, f"{name}_ms")) for name in STAGES if name != "rest"}
    return parts | {"rest": max(recovery.ttft_ms - sum(parts.values()), 0.0)}


def _computed(recovery: Recovery) -> int:
    """Returns how many rows of the prompt were computed, by us and by vLLM."""
    return recovery.fresh_tokens + recovery.repair_tokens + recovery.new_tokens + recovery.lost_tokens


def _total(rows: Iterable[Row]) -> Totals:
    rows = list(rows)
    entries = [row.entry for row in rows]
    known = [entry.recovery for entry in entries if entry.recovery is not None]
    resumed = [recovery for recovery in known if recovery.restored_tokens or recovery.reused_tokens]
    saved = [row.saved_ms for row in rows if row.saved_ms is not None]
    checks = [check for entry in entries for check in entry.checks]
    return Totals(
        versions=len(rows),
        episodes=len({entry.revised.episode for entry in entries}),
        forks=sum(row.lane.fork for row in rows),
        resumes=len(resumed),
        approximate=sum(not recovery.exact for recovery in resumed),
        prompt_tokens=sum(entry.revised.new_len for entry in entries),
        prefix_tokens=sum(row.counts.get("P", 0) for row in rows),
        computed_tokens=sum(map(_computed, known)),
        saved_tokens=sum(row.saved_tokens for row in rows),
        saved_ms=sum(saved) if saved else None,
        ttft_ms=sum(row.ttft_ms for row in rows),
        checks=len(checks),
        strikes=sum(check.strike for check in checks),
    )
