"""One contiguous run that ends where the answer stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.recovery.attention_blocks import rank_by_mean
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.edit_local import first_rows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import QUERY_ROWS, block_runs, check_count, stored_attention, suffix_rows, unasked_rows
from agentcache.types import Run

__all__ = ["EditToCarrier"]


@register
@dataclass(frozen=True)
class EditToCarrier(RecoveryPolicy):
    """Lossy: recomputes one run from the first edit to the last highly attended block; the rows of that run are exact.

    Ours, the window over the path from the edit to the carrier that EditLocal leaves untested (§6 Where repair still fails). The
    carriers are the blocks with the highest mean stored attention (formulas 10), at most `blocks` of them. The run ends with
    the last carrier that it reaches within `k` tokens. A carrier beyond that is recomputed on its own, as `attention_blocks`
    does: it is fresh, but reads stale rows. Every later edit that the run does not reach keeps its window. The run's rows
    are exact where the prefix is. Selection costs no forward pass.

    Attributes:
        k: Most aligned tokens that the run recomputes.
        blocks: How many blocks are taken for carriers. **choice**: 4 of 8 tokens, which held the carrier at every distance
            that was measured (formulas, the table below EditLocal).
        block: Tokens a block.
        window: First tokens of each aligned run after an edit that are recomputed in any case.
        query: Last rows of the parent that are no candidates: they asked.
    """

    name: ClassVar[str] = "edit_to_carrier"
    source: ClassVar[str] = "agentcache, from the carriers and the contiguity of EditLocal"
    reads_attention: ClassVar[bool] = True

    k: int = 512
    blocks: int = 4
    block: int = 8
    window: int = 16
    query: int = QUERY_ROWS

    def __post_init__(self) -> None:
        for option, value, least in (("k", self.k, 0), ("blocks", self.blocks, 0), ("block", self.block, 1)):
            check_count(self.name, option, value, least)
        for option, value in (("window", self.window), ("query", self.query)):
            check_count(self.name, option, value, 0)

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the run, the windows, and the carriers that the run does not reach, most attended first.

        Raises:
            ConfigError: Something follows an edit, but the parent's attention was not measured.
        """
        diff = context.diff
        if not diff.suffix:
            return ()
        suffix = suffix_rows(diff)
        candidates = suffix & unasked_rows(diff, self.query)
        ranked = rank_by_mean(stored_attention(context, self.name), candidates, self.block)
        carriers = list(block_runs(ranked[: self.blocks], self.block))
        cost = np.cumsum(suffix)  # aligned tokens up to and with each row
        stops = [carrier.stop for carrier in carriers if cost[min(carrier.stop, diff.new_len) - 1] <= self.k]
        path = [Run(diff.suffix[0].new_start, max(stops))] if stops else []
        return [*path, *first_rows(context, self.window), *carriers]
