"""Bounds that every policy understands, beside its own options: a budget, and an age."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.rows import Mask, check_count, check_share, mask_runs, suffix_rows

__all__ = ["Bounded", "Bounds"]


@dataclass(frozen=True)
class Bounds:
    """Options that `get_policy` takes for every policy, e.g. `{"k": 64, "max_share": 0.1, "max_generations": 3}`.

    Attributes:
        max_tokens: Most tokens that the policy may choose.
        max_share: The same, as a share of the aligned suffix S.
        max_generations: Most edits that a row may survive without being recomputed.
    """

    max_tokens: int | None = None
    max_share: float | None = None
    max_generations: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_count("every policy", "max_tokens", self.max_tokens, 0)
        if self.max_share is not None:
            check_share("every policy", "max_share", self.max_share)
        if self.max_generations is not None:
            check_count("every policy", "max_generations", self.max_generations, 1)

    def budget(self, suffix_tokens: int) -> int:
        """Returns how many tokens of a suffix may be chosen; the smaller bound holds."""
        budgets = [suffix_tokens]
        if self.max_tokens is not None:
            budgets.append(self.max_tokens)
        if self.max_share is not None:
            budgets.append(int(round(self.max_share * suffix_tokens, 9)))
        return min(budgets)


@dataclass(frozen=True)
class Bounded(RecoveryPolicy):
    """Lossy: another policy within bounds. It goes by that policy's name and source.

    The budget keeps the runs that the policy returns first, so a policy that ranks returns the most important ones first; the
    last run is cut. Rows that are too old join R whatever the budget says: it bounds a choice, and age leaves none.

    Attributes:
        policy: Is not exact: exact policies restore nothing that could be too much or too old.
        bounds: At least one is set.
    """

    name: ClassVar[str] = "bounded"
    source: ClassVar[str] = "agentcache"

    policy: RecoveryPolicy
    bounds: Bounds

    def __post_init__(self) -> None:
        assert not self.policy.exact and self.bounds != Bounds()
        for attribute in ("name", "source"):
            object.__setattr__(self, attribute, getattr(self.policy, attribute))

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns what the policy selects within the budget, and the rows that are too old, as ascending runs.

        Raises:
            ConfigError: Something follows an edit and ages are bounded, but it is not known how old the rows are.
        """
        suffix = suffix_rows(context.diff)
        chosen = self._chosen(context, suffix)
        if self.bounds.max_generations is not None and context.diff.suffix:
            if context.generations is None:
                raise ConfigError(
                    f"max_generations={self.bounds.max_generations} bounds how many edits a row survives, which is not known "
                    "for this parent; leave it out"
                )
            chosen |= suffix & (context.generations >= self.bounds.max_generations)
        return mask_runs(chosen)

    def _chosen(self, context: PolicyContext, suffix: Mask) -> Mask:
        """Returns the rows of the policy's runs, in their order, until the budget is spent, bool `[T]`."""
        left, free = self.bounds.budget(int(np.count_nonzero(suffix))), suffix.copy()
        for start, stop in self.policy.select(context):
            if left == 0:
                break
            low = max(start, 0)
            taken = np.flatnonzero(free[low : max(stop, low)])[:left] + low
            free[taken] = False
            left -= len(taken)
        return suffix & ~free
