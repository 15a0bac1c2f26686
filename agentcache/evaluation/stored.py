"""How the rows that a resume restored had been stored: counts of an item, shares of a cell, text of a table. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from agentcache.labels import NOTHING, count_labels
from agentcache.reply import RecoveryReport

__all__ = ["rows_stored", "shares_stored", "text_stored"]


def rows_stored(recovery: RecoveryReport) -> dict[str, int]:
    """Returns the rows that were restored, by the precision they had been stored in."""
    return {tag: rows for tag, rows in count_labels(recovery.precisions).items() if tag != NOTHING}


def shares_stored(counts: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Returns the share of each precision in all rows that were restored; empty where none was."""
    stored: Counter[str] = Counter()
    for each in counts:
        stored.update(each)
    return {tag: round(count / stored.total(), 6) for tag, count in sorted(stored.items())}


def text_stored(shares: Mapping[str, float]) -> str:
    """Returns the shares in words, the most frequent precision first."""
    ranked = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(tag if share == 1 else f"{tag} {share:.0%}" for tag, share in ranked) or "–"
