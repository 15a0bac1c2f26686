"""Rows, blocks and windows of the aligned suffix as arrays: what several policies compute the same way.

Letters: `T` tokens of the new prompt, `B` tokens a block, `N = ceil(T / B)` blocks. Block b holds rows `[b·B, (b+1)·B)` of the
new prompt, as the engine's pages do; the planner clips it to the suffix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext
from agentcache.types import PromptDiff, Run

__all__ = [
    "QUERY_ROWS",
    "Indices",
    "Mask",
    "Scores",
    "block_runs",
    "blocks_within",
    "by_block",
    "check_count",
    "check_share",
    "distances",
    "mask_runs",
    "ranked_runs",
    "share_of",
    "stored_attention",
    "suffix_rows",
    "unasked_rows",
]

Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

QUERY_ROWS = 32
"""Rows at the parent's end that asked for the stored attention (formulas 10) and attend to themselves first of all."""


def suffix_rows(diff: PromptDiff) -> Mask:
    """Returns which rows are S, bool `[T]`."""
    rows = np.zeros(diff.new_len, dtype=np.bool_)
    for run in diff.suffix:
        rows[run.new_start : run.new_stop] = True
    return rows


def distances(diff: PromptDiff) -> npt.NDArray[np.int64]:
    """Returns how far each row stands behind the join before it, `[T]`: d of PatchKV, formulas 4; 0 where no join is before it.

    A join is where an aligned run begins again after an edit. With several edits each row counts from the nearest one
    before it (**choice**: the paper has one edit).
    """
    joins = np.array([run.new_start for run in diff.suffix], dtype=np.int64)
    last = np.zeros(diff.new_len, dtype=np.int64)
    last[joins] = joins
    rows = np.arange(diff.new_len)
    first = joins[0] if len(joins) else diff.new_len
    return np.where(rows < first, 0, rows - np.maximum.accumulate(last))


def unasked_rows(diff: PromptDiff, query: int) -> Mask:
    """Returns which rows did not themselves measure the attention, bool `[T]`: all but the parent's last `query` ones."""
    rows = np.ones(diff.new_len, dtype=np.bool_)
    first = diff.old_len - query
    for run in diff.suffix:
        if run.old_stop > first:
            rows[max(run.new_start, first + run.shift) : run.new_stop] = False
    return rows


def stored_attention(context: PolicyContext, policy: str) -> Scores:
    """Returns the attention that was measured when the parent was saved, float32 `[T]`.

    Raises:
        ConfigError: It was not measured.
    """
    if context.attention is None:
        raise ConfigError(
            f"policy {policy!r} reads the attention of the parent's checkpoint, which was not measured when it was saved: "
            f"set connector={{'attention': True}} (a cache whose policy this is does), or take one that needs none, such as 'edit_local'"
        )
    return context.attention


def by_block(rows: npt.NDArray[Any], block: int, fill: Any) -> npt.NDArray[Any]:
    """Returns values of rows `[T]` as `[N, B]`, the last block filled up; a block that is longer than the prompt ends with it."""
    block = max(1, min(block, len(rows)))
    padded = np.full(-(-len(rows) // block) * block, fill, dtype=rows.dtype)
    padded[: len(rows)] = rows
    return padded.reshape(-1, block)


def block_runs(blocks: Iterable[int], block: int) -> Iterator[Run]:
    """Yields the rows of each block, in the given order."""
    for at in blocks:
        yield Run(int(at) * block, (int(at) + 1) * block)


def blocks_within(ranked: Indices, sizes: Indices, budget: int) -> Indices:
    """Returns as many of the first ranked blocks as fit a budget together, whole.

    Args:
        ranked: Blocks, best first.
        sizes: Tokens that each block costs, `[N]`.
        budget: Tokens.
    """
    return ranked[: np.count_nonzero(np.cumsum(sizes[ranked]) <= budget)]


def mask_runs(rows: Mask) -> list[Run]:
    """Returns the runs of rows that are set, ascending and merged."""
    edges = np.flatnonzero(np.diff(rows.astype(np.int8), prepend=0, append=0)).tolist()
    return [Run(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def ranked_runs(rows: Indices, scores: Scores, count: int) -> list[Run]:
    """Returns the `count` rows of the highest score as runs of one row each, best first; equal ones keep their order.

    Args:
        rows: Candidates, ascending.
        scores: `[T]`.
        count: Most rows.
    """
    best = rows[np.argsort(-scores[rows], kind="stable")[:count]]
    return [Run(row, row + 1) for row in best.tolist()]


def share_of(share: float, count: int) -> int:
    """Returns `⌈share · count⌉`, with the share taken as the decimal that was written: 7 % of 100 are 7, not 8."""
    return math.ceil(round(share * count, 9))


def check_count(policy: str, option: str, value: int, least: int) -> None:
    """Raises ConfigError when an option that counts something is too small."""
    if value < least:
        raise ConfigError(f"{policy}: {option}={value} is not allowed; take {least} or more")


def check_share(policy: str, option: str, value: float) -> None:
    """Raises ConfigError when an option that is a share does not lie in [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{policy}: {option}={value} is not allowed; take a share from 0 to 1")
