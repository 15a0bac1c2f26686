"""The page: one HTML file with its style, script and data inside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agentcache.labels import NOTHING, count_labels
from agentcache.report.log import Pause
from agentcache.report.model import LABELS, STAGES, Family, Report, Row

__all__ = ["render_page"]

_HERE = Path(__file__).parent

_LABEL_HELP = {
    "P": "prefix kept",
    "F": "reused after the edit",
    "X": "new in the middle",
    "R": "repaired: aligned, computed again",
    "N": "left to vLLM",
    "S": "aligned; the log does not tell whether reused",
}


def render_page(report: Report, *, title: str) -> str:
    """Returns the page of a report; whatever text the log holds is in it.

    Args:
        report: What to show.
        title: Stands at the top, e.g. the log's name.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": _count, "duration": _duration, "clock": _clock, "share": _share, "day": _day}
    rows = [row for family in report.families for row in family.rows]
    return environment.get_template("template.html").render(
        title=title,
        report=report,
        families=[_family(family) for family in report.families],
        labels=[
            (label, _LABEL_HELP[label]) for label in "PFXRNS" if label != "S" or any("S" in r.counts for r in rows)
        ],
        columns=[label for label in LABELS if label != "S" or any("S" in row.counts for row in rows)],
        stages=STAGES,
        first=min((row.entry.revised.time_s for row in rows), default=None),
        last=max((_end(row) for row in rows), default=None),
        has_text=any(row.entry.ended and row.entry.ended.fresh_text is not None for row in rows),
        style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        script=Markup((_HERE / "page.js").read_text(encoding="utf-8")),
        data=_json([_payload(row) for row in sorted(rows, key=lambda row: row.number)]),
    )


def _json(value: Any) -> Markup:
    """Returns JSON that may stand in a script element, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _payload(row: Row) -> dict[str, Any]:
    """Returns what the script needs of a version; it rebuilds texts from the parents' by the diffs."""
    revised, ended = row.entry.revised, row.entry.ended
    known: dict[str, Any] = {
        "v": revised.version,
        "parent": revised.parent,
        "old": revised.old_len,
        "aligned": [list(run) for run in revised.aligned],
        "labels": row.labels,
        "precisions": row.precisions,
        "stages": {name: round(ms, 3) for name, ms in row.stages.items()},
    }
    if ended is not None:
        named = zip(ended.spans, revised.labels, strict=False)
        known["messages"] = [[start, stop, label] for (start, stop), label in named]
        if ended.fresh_text is not None:
            known |= {"fresh": ended.fresh_text, "reply": ended.reply_text}
    return known


def _family(family: Family) -> dict[str, Any]:
    longest = max(row.entry.revised.new_len for row in family.rows)
    slowest = max(row.ttft_ms + max(row.saved_ms or 0.0, 0.0) for row in family.rows)
    many = len(family.episodes) > 1
    return {
        "name": family.episodes[0],
        "others": family.episodes[1:],
        "totals": family.totals,
        "lanes": family.lanes,
        "longest": longest,
        "slowest": slowest,
        "rows": [_shown(row, longest, slowest, many) for row in family.rows],
    }


def _shown(row: Row, longest: int, slowest: float, many: bool) -> dict[str, Any]:
    """Returns a row as the template shows it."""
    revised, recovery = row.entry.revised, row.entry.recovery
    return {
        "number": row.number,
        "row": row,
        "revised": revised,
        "recovery": recovery,
        "ended": row.entry.ended,
        "kind": revised.kind.replace("_", " "),
        "episode": revised.episode if many else None,
        "width": round(100 * revised.new_len / longest, 3) if longest else 0,
        "bars": _bars(row, longest, slowest),
        "slices": [(name, ms, round(100 * ms / slowest, 3)) for name, ms in row.stages.items() if ms and slowest],
        "ghost": round(100 * (row.ttft_ms + row.saved_ms) / slowest, 3) if row.saved_ms and row.saved_ms > 0 else 0,
        "reason": recovery.reason if recovery is not None else None,
        "tags": [(tag, rows) for tag, rows in count_labels(row.precisions).items() if tag != NOTHING],
        "idle": max((pause.seconds for pause in row.entry.pauses), default=None),
        "waits": [_pause(pause) for pause in row.entry.pauses if pause.reason != "the reply ended"],
        "facts": [*_facts(row)],
    }


def _bars(row: Row, longest: int, slowest: float) -> dict[str, Any]:
    """Returns the heights of a version's bars in the overview, in percent: tokens by label, and the time."""
    tokens, at = [], 0.0
    for label in "PFSRXN":
        height = 100 * row.counts.get(label, 0) / longest if longest else 0.0
        if height:
            tokens.append((label, round(100 - at - height, 3), round(height, 3)))
        at += height
    return {"tokens": tokens, "time": round(100 * row.ttft_ms / slowest, 3) if slowest else 0}


def _pause(pause: Pause) -> str:
    what = f"{pause.key}: {pause.reason}" if pause.reason else pause.key
    return f"waited {_duration(1e3 * pause.seconds)} for {what}"


def _facts(row: Row) -> Iterable[tuple[str, str]]:
    """Yields what else is known of a version, for its details."""
    revised, recovery, ended = row.entry.revised, row.entry.recovery, row.entry.ended
    yield "version", revised.version
    yield "episode", revised.episode
    if revised.parent:
        yield "parent", revised.parent
    yield "tokens", f"{revised.new_len:,} after {revised.old_len:,}; common prefix {revised.prefix:,}"
    moved = sum(run.length for run in revised.aligned if run.shift)
    if moved:
        yield "moved", f"{moved:,} aligned tokens stand at another position"
    if recovery is not None:
        asked = "" if recovery.requested_policy == recovery.policy else f" ({recovery.requested_policy} was asked for)"
        yield "policy", recovery.policy + asked
        yield "rows", "those of a full prefill" if recovery.exact else "approximate behind the edit"
        if recovery.reason:
            yield "reason", recovery.reason
        if recovery.sources:
            yield (
                "sources",
                f"{recovery.source_tokens:,} tokens of {len(recovery.sources)}: {', '.join(recovery.sources)}",
            )
        if recovery.lost_sources:
            yield "lost sources", ", ".join(recovery.lost_sources)
        if recovery.restored_tokens:
            yield (
                "restored",
                f"{recovery.restored_tokens:,} rows, {recovery.restored_bytes:,} bytes, from {recovery.tier}",
            )
        if recovery.lost_tokens:
            yield "lost", f"{recovery.lost_tokens:,} rows were computed instead"
        if recovery.local_tokens:
            yield "in vLLM's cache", f"{recovery.local_tokens:,} rows"
        if recovery.estimate:
            yield "estimate", ", ".join(f"{name[:-3]} {_duration(ms)}" for name, ms in recovery.estimate.items())
        yield "checkpoint", {"pending": "kept", "no": "not kept", "refused": "refused"}[recovery.saved]
    if row.saved_ms is not None:
        yield "time saved", f"{_duration(row.saved_ms)} (estimate)"
    if ended is not None:
        yield "reply", f"{ended.reply_tokens:,} tokens, ended by {ended.finish_reason}"
    for check in row.entry.checks:
        agrees = "same" if check.top1_agrees else "another"
        strike = ", beyond the bound" if check.strike else ""
        yield "quality check", f"KL {check.kl:.4f}, {agrees} first token{strike}"
    for fall in row.entry.falls:
        yield "runs exactly now", f"the {fall.scope}: {fall.reason}"


def _end(row: Row) -> float:
    return row.entry.ended.time_s if row.entry.ended else row.entry.revised.time_s


def _count(value: float) -> str:
    return f"{round(value):,}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.1 or not value else f"{100 * value:.1f} %"


def _duration(ms: float) -> str:
    """Returns milliseconds for people."""
    sign, ms = ("−" if ms < 0 else ""), abs(ms)
    if ms < 10:
        return f"{sign}{ms:.1f} ms"
    if ms < 1000:
        return f"{sign}{ms:.0f} ms"
    if ms < 60_000:
        return f"{sign}{ms / 1000:.1f} s"
    minutes = ms / 60_000
    return f"{sign}{minutes:.1f} min" if minutes < 120 else f"{sign}{minutes / 60:.1f} h"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S")


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
