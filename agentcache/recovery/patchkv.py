"""PatchKV's repair set: what drifts near the edit, and what is looked at far from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.length_model import LengthModel
from agentcache.recovery.registry import register
from agentcache.recovery.rows import (
    QUERY_ROWS,
    Indices,
    Mask,
    Scores,
    block_runs,
    by_block,
    check_count,
    check_share,
    share_of,
    stored_attention,
    suffix_rows,
    unasked_rows,
)
from agentcache.types import PromptDiff

__all__ = ["PatchKV", "dirty_windows"]


@register
@dataclass(frozen=True)
class PatchKV(RecoveryPolicy):
    r"""Lossy: recomputes the blocks of a dirty window behind each edit and of the most attended tokens beyond it.

    ```
    d_i = ρ_i − (|P| + |M_new|)                      formulas 4
    D   = { i ∈ S : d_i < min(|S|, q̂) }              formulas 9, q̂ from formulas 8
    H   = the ⌈κ·|S \ D|⌉ highest-I tokens of S \ D   formulas 11, I from formulas 10
    R   = BlockRound_S(D ∪ H)                        formulas 12
    ```

    **choice**, where the paper is silent: blocks are those of the new prompt's pages; with several edits D is the union of
    each edit's window, whose lengths are the rows before the edit, its new rows, and the aligned rows behind it; the rows
    that asked for the attention are no candidates of H. Selection costs no forward pass: attention was measured when the
    checkpoint was saved. Restored blocks come at the precision that they were saved in (formulas 13 and 14).

    Attributes:
        window: q̂ as a fixed number of tokens. Give this or `length_model`.
        length_model: q̂ from the lengths: the coefficients of a profile, `LengthModel.to_text()`.
        kappa: κ, the share that H takes; 0 leaves D alone and needs no attention.
        count: What κ counts. `"blocks"` (**choice**, formulas 11) ranks blocks by their best token and takes `⌈κ·n⌉` of the n
            that D leaves; `"tokens"` is the paper's rule, where each scattered token claims its block.
        block: Tokens a block.
        query: Last rows of the parent that are no candidates.
    """

    name: ClassVar[str] = "patchkv"
    source: ClassVar[str] = "PatchKV: Efficient KV Cache Recovery for Dynamically Edited LLM Contexts"
    reads_attention: ClassVar[bool] = True

    window: int | None = None
    length_model: str | None = None
    kappa: float = 0.015
    count: Literal["blocks", "tokens"] = "blocks"
    block: int = 32
    query: int = QUERY_ROWS

    def __post_init__(self) -> None:
        if (self.window is None) == (self.length_model is None):
            raise ConfigError(
                f"patchkv takes its dirty window from the model's profile or from window=TOKENS, exactly one of them; got "
                f"window={self.window}, length_model={self.length_model!r}. Make a profile with `agentcache profile` and give "
                f"it as profile=FILE to the cache, or set the window"
            )
        if self.window is not None:
            check_count(self.name, "window", self.window, 0)
        if self.length_model is not None:
            LengthModel.from_text(self.length_model)
        check_share(self.name, "kappa", self.kappa)
        check_count(self.name, "block", self.block, 1)
        check_count(self.name, "query", self.query, 0)

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the blocks of D ascending, then those of H, most attended first.

        Raises:
            ConfigError: Something follows an edit and κ is not 0, but the parent's attention was not measured.
        """
        diff = context.diff
        if not diff.suffix:
            return ()
        suffix = suffix_rows(diff)
        dirty = self._dirty(diff, suffix)
        chosen = np.flatnonzero(by_block(dirty, self.block, fill=False).any(axis=1))
        if self.kappa > 0:
            candidates = suffix & ~dirty & unasked_rows(diff, self.query)
            rank = self._best_blocks if self.count == "blocks" else self._blocks_of_best_tokens
            chosen = np.concatenate([chosen, rank(stored_attention(context, self.name), candidates, chosen)])
        return block_runs(chosen, self.block)

    def planned_tokens(self, context: PolicyContext, selected: int) -> int:
        """Returns |D ∪ H|, before R is rounded to blocks (formulas 12); H counted in blocks is as many blocks' tokens."""
        diff = context.diff
        if not selected:
            return 0
        suffix = suffix_rows(diff)
        dirty = self._dirty(diff, suffix)
        rest = suffix & ~dirty & unasked_rows(diff, self.query)
        if self.count == "tokens":
            share = share_of(self.kappa, int(np.count_nonzero(rest)))
        else:
            clean = by_block(rest, self.block, fill=False).any(axis=1) & ~by_block(dirty, self.block, fill=False).any(
                axis=1
            )
            share = share_of(self.kappa, int(np.count_nonzero(clean))) * self.block
        return min(int(np.count_nonzero(dirty)) + share, selected)

    def _dirty(self, diff: PromptDiff, suffix: Mask) -> Mask:
        """Returns D, bool `[T]`."""
        runs = diff.suffix
        model = None if self.length_model is None else LengthModel.from_text(self.length_model)
        windows = dirty_windows(diff, model, self.window or 0)
        dirty = np.zeros_like(suffix)
        for run, window in zip(runs, windows, strict=True):
            dirty[run.new_start : run.new_start + window] = True
        return dirty & suffix

    def _best_blocks(self, attention: Scores, candidates: Mask, dirty_blocks: Indices) -> Indices:
        """Returns the κ-share of blocks outside of D with the most attended tokens, best first."""
        best = by_block(np.where(candidates, attention, -1), self.block, fill=-1).max(axis=1)
        best[dirty_blocks] = -1
        clean = np.flatnonzero(best >= 0)
        return clean[np.argsort(-best[clean], kind="stable")[: share_of(self.kappa, len(clean))]]

    def _blocks_of_best_tokens(self, attention: Scores, candidates: Mask, _dirty_blocks: Indices) -> Indices:
        """Returns the blocks of the κ-share of most attended tokens, best first; a block may come twice."""
        rows = np.flatnonzero(candidates)
        top = rows[np.argsort(-attention[rows], kind="stable")[: share_of(self.kappa, len(rows))]]
        return top // self.block


def dirty_windows(diff: PromptDiff, model: LengthModel | None, window: int) -> list[int]:
    """Returns how many rows at the start of each aligned run behind an edit are dirty (formulas 9).

    Args:
        diff: With any number of edits; each counts the rows before it, its new rows, and the aligned rows behind it.
        model: Says how many; None: `window` for each.
        window: A fixed number.
    """
    runs = diff.suffix
    if model is None or not runs:
        return [window] * len(runs)
    joins = np.array([run.new_start for run in runs])
    lengths = np.array([run.length for run in runs])
    middles = joins - np.array([diff.prefix, *(run.new_stop for run in runs[:-1])])
    behind = np.cumsum(lengths[::-1])[::-1]
    return [int(rows) for rows in model.windows(joins - middles, middles, behind)]
