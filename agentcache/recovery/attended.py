"""What the query looks at, as small contiguous blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.attention_blocks import rank_by_mean
from agentcache.recovery.base import OnlinePolicy, PolicyContext, Signal, Signals
from agentcache.recovery.edit_local import first_rows
from agentcache.recovery.query import query_rows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import Scores, block_runs, blocks_within, by_block, check_count, suffix_rows

__all__ = ["Attended"]


@register
@dataclass(frozen=True)
class Attended(OnlinePolicy):
    """Lossy: recomputes the small blocks of the aligned suffix that the query attends to most, and a short window after each edit.

    Ours. The query, the prompt's last message or its last rows, is never reused; it asks the stale rows, with the edit and
    the windows fresh, in the forward that computes those. Blocks are ranked by the mean attention of the query's last rows, over
    heads and four layers of the second half: contiguous blocks recover at 32 to 64 tokens what single tokens of the same scores do
    not (formulas, the table below EditLocal). The cost is that of up to 32 rows more in a forward, and of the scores.

    Where nothing asks, `by="deviation"` ranks by how far values deviate at the check layer instead, which costs the layers
    before it over X and S; `by="product"` takes the geometric mean of both.

    Attributes:
        by: What ranks the blocks.
        k: Most tokens in blocks; the windows and the query come on top.
        block: Tokens a block.
        window: First tokens of each aligned run after an edit that are recomputed in any case.
        check: The layer whose values are compared, from 1. The third: after two layers they tell the carrier, after one less so.
    """

    name: ClassVar[str] = "attended"
    source: ClassVar[str] = "agentcache, from ProphetKV's query attention and the contiguity of EditLocal"

    by: Literal["query", "deviation", "product"] = "query"
    k: int = 64
    block: int = 8
    window: int = 16
    check: int = 2

    def __post_init__(self) -> None:
        for option, value, least in (
            ("k", self.k, 0),
            ("block", self.block, 1),
            ("window", self.window, 0),
            ("check", self.check, 1),
        ):
            check_count(self.name, option, value, least)

    @property
    def signals(self) -> frozenset[Signal]:
        """The query's attention, deviations at the check layer, or both."""
        asked = {"query": {Signal.QUERY}, "deviation": {Signal.CHECK}}
        return frozenset(asked.get(self.by, {Signal.QUERY, Signal.CHECK}))

    @property
    def check_layer(self) -> int:
        """The layer whose values are compared."""
        return self.check

    def most(self, context: PolicyContext) -> int:  # noqa: ARG002
        """Returns k."""
        return self.k

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the windows, then the query."""
        return [*first_rows(context, self.window), query_rows(context)] if context.diff.suffix else ()

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns the most attended blocks, best first."""
        candidates = suffix_rows(context.diff) & ~signals.done
        ranked = rank_by_mean(self._scores(signals), candidates, self.block)
        costs = by_block(candidates, self.block, fill=False).sum(axis=1)
        return block_runs(blocks_within(ranked, costs, self.k), self.block)

    def _scores(self, signals: Signals) -> Scores:
        """Returns what ranks each row, float32 `[T]`."""
        asked = {"query": [signals.query], "deviation": [signals.value_deviation]}
        measured = asked.get(self.by, [signals.query, signals.value_deviation])
        given = [scores for scores in measured if scores is not None]
        if len(given) < len(measured):
            raise ConfigError(f"{self.name} with by={self.by!r} was not given what it ranks by")
        return given[0] if len(given) == 1 else np.sqrt(given[0] * given[1])
