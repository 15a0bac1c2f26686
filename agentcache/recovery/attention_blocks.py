"""What the end of the parent looked at, as small contiguous blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.edit_local import first_rows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import (
    QUERY_ROWS,
    Indices,
    Mask,
    Scores,
    block_runs,
    blocks_within,
    by_block,
    check_count,
    stored_attention,
    suffix_rows,
    unasked_rows,
)

__all__ = ["AttentionBlocks", "rank_by_mean"]


@register
@dataclass(frozen=True)
class AttentionBlocks(RecoveryPolicy):
    """Lossy: recomputes the most attended small blocks of the aligned suffix and a short window after each edit.

    Ours. Blocks are ranked by their mean stored attention (formulas 10): what the parent's prompt and reply attended to at
    their ends, over sampled layers and all heads. That stands in for the attention of the new query, which no pass has asked
    here, and is the better the more the next question resembles the last. Contiguous blocks, since scores of single tokens
    did worse at the same budget (formulas, the table below EditLocal). Selection costs no forward pass.

    Attributes:
        k: Most tokens in blocks; the windows come on top.
        block: Tokens a block; 8 or 16 were measured.
        window: First tokens of each aligned run after an edit that are recomputed in any case.
        query: Last rows of the parent that are no candidates: they asked.
    """

    name: ClassVar[str] = "attention_blocks"
    source: ClassVar[str] = "agentcache, from the stored attention of PatchKV and the contiguity of EditLocal"
    reads_attention: ClassVar[bool] = True

    k: int = 64
    block: int = 8
    window: int = 16
    query: int = QUERY_ROWS

    def __post_init__(self) -> None:
        for option, value, least in (("k", self.k, 0), ("block", self.block, 1), ("window", self.window, 0)):
            check_count(self.name, option, value, least)
        check_count(self.name, "query", self.query, 0)

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the windows, then the blocks, most attended first.

        Raises:
            ConfigError: Something follows an edit, but the parent's attention was not measured.
        """
        diff = context.diff
        if not diff.suffix:
            return ()
        windows = first_rows(context, self.window)
        open_rows = suffix_rows(diff)
        for start, stop in windows:
            open_rows[start:stop] = False
        candidates = open_rows & unasked_rows(diff, self.query)
        ranked = rank_by_mean(stored_attention(context, self.name), candidates, self.block)
        costs = by_block(open_rows, self.block, fill=False).sum(axis=1)
        return [*windows, *block_runs(blocks_within(ranked, costs, self.k), self.block)]


def rank_by_mean(scores: Scores, candidates: Mask, block: int) -> Indices:
    """Returns the blocks with candidates, those of the highest mean score first; equal ones keep their order.

    Args:
        scores: `[T]`.
        candidates: Rows whose scores count, `[T]`.
        block: Tokens a block.
    """
    counts = by_block(candidates, block, fill=False).sum(axis=1)
    sums = by_block(np.where(candidates, scores, 0), block, fill=0).sum(axis=1, dtype=np.float64)
    blocks = np.flatnonzero(counts)
    return blocks[np.argsort(-(sums[blocks] / counts[blocks]), kind="stable")]
