"""Bounds that every policy understands, beside its own options: a budget, and an age."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agentcache.errors import ConfigError
from agentcache.recovery.base import OnlinePolicy, PolicyContext, RecoveryPolicy, Signal, Signals
from agentcache.recovery.rows import Mask, check_count, check_share, mask_runs, suffix_rows

__all__ = ["Bounded", "BoundedOnline", "Bounds", "bounded"]


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
        """Returns the rows of the policy's runs within the budget, bool `[T]`."""
        return _first(self.policy.select(context), suffix, self.bounds.budget(int(np.count_nonzero(suffix))))


@dataclass(frozen=True)
class BoundedOnline(Bounded, OnlinePolicy):
    """Lossy: an online policy within bounds. What it chooses in the worker spends what its selection left of the budget."""

    name: ClassVar[str] = "bounded_online"
    source: ClassVar[str] = "agentcache"

    @property
    def _online(self) -> OnlinePolicy:
        assert isinstance(self.policy, OnlinePolicy)
        return self.policy

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "iterative", self._online.iterative)

    @property
    def signals(self) -> frozenset[Signal]:
        """What the policy asks for."""
        return self._online.signals

    @property
    def check_layer(self) -> int:
        """The policy's."""
        return self._online.check_layer

    @property
    def probe_share(self) -> float | None:
        """The policy's."""
        return self._online.probe_share

    def shift_weights(self, signals: Signals) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Returns the policy's."""
        return self._online.shift_weights(signals)

    @property
    def effect_block(self) -> int:
        """The policy's."""
        return self._online.effect_block

    @property
    def transplants(self) -> bool:
        """The policy's."""
        return self._online.transplants

    def most(self, context: PolicyContext) -> int:
        """Returns the smaller of the policy's count and the budget."""
        return min(self._online.most(context), self.bounds.budget(sum(run.length for run in context.diff.suffix)))

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns what the policy chooses within what is left of the budget, as ascending runs."""
        suffix = suffix_rows(context.diff)
        left = self.bounds.budget(int(np.count_nonzero(suffix))) - int(np.count_nonzero(signals.done & suffix))
        return mask_runs(_first(self._online.choose(context, signals), suffix & ~signals.done, max(left, 0)))


def bounded(policy: RecoveryPolicy, bounds: Bounds) -> RecoveryPolicy:
    """Returns a policy within bounds; the policy itself when nothing is bounded, or when it is exact."""
    if policy.exact or bounds == Bounds():
        return policy
    return BoundedOnline(policy, bounds) if isinstance(policy, OnlinePolicy) else Bounded(policy, bounds)


def _first(runs: Iterable[tuple[int, int]], rows: Mask, budget: int) -> Mask:
    """Returns those of `rows` that lie in the runs, in the order of the runs, until the budget is spent, bool `[T]`."""
    left, free = budget, rows.copy()
    for start, stop in runs:
        if left == 0:
            break
        low = max(start, 0)
        taken = np.flatnonzero(free[low : max(stop, low)])[:left] + low
        free[taken] = False
        left -= len(taken)
    return rows & ~free
