"""ProphetKV: single tokens by the attention that the query pays them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import OnlinePolicy, PolicyContext, Signal, Signals
from agentcache.recovery.query import query_rows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import check_count, check_share, ranked_runs, share_of, suffix_rows

__all__ = ["ProphetKV"]


@register
@dataclass(frozen=True)
class ProphetKV(OnlinePolicy):
    """Lossy: recomputes the tokens of the aligned suffix that the query attends to most, one by one.

    The Attention policy of EditLocal's comparison: reused tokens are ranked by the attention that the user's query pays them
    over the stale cache, here of its last rows, over heads and four layers of the second half, which tell more than all rows and
    layers do (`engine.attention_probe.query_layers`). The query itself is always recomputed. The cost is that of up to 32 rows
    more in a forward, and of the scores.

    Attributes:
        share: Share of S that is recomputed. ProphetKV needs 0.45 to 0.55 on LoCoMo (AgentKVShift's measure).
        k: The same as a number of tokens; wins over `share` when given.
    """

    name: ClassVar[str] = "prophetkv"
    source: ClassVar[str] = "ProphetKV, as described in Contiguity, Not Importance and AgentKVShift"

    share: float = 0.15
    k: int | None = None

    def __post_init__(self) -> None:
        check_share(self.name, "share", self.share)
        if self.k is not None:
            check_count(self.name, "k", self.k, 0)

    @property
    def signals(self) -> frozenset[Signal]:
        """The query's attention."""
        return frozenset({Signal.QUERY})

    def most(self, context: PolicyContext) -> int:
        """Returns k, or the share of S."""
        return self.k if self.k is not None else share_of(self.share, sum(run.length for run in context.diff.suffix))

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the query."""
        return [query_rows(context)] if context.diff.suffix else ()

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns the most attended tokens, best first."""
        if signals.query is None:
            raise ConfigError(f"{self.name} was not given the query's attention")
        rows = np.flatnonzero(suffix_rows(context.diff) & ~signals.done)
        return ranked_runs(rows, signals.query, self.most(context))
