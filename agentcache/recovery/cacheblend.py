"""CacheBlend: the tokens whose K/V deviate most at a check layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import OnlinePolicy, PolicyContext, Signal, Signals
from agentcache.recovery.registry import register
from agentcache.recovery.rows import check_count, check_share, ranked_runs, share_of, suffix_rows

__all__ = ["CacheBlend"]


@register
@dataclass(frozen=True)
class CacheBlend(OnlinePolicy):
    """Lossy: recomputes the tokens of the aligned suffix whose K/V deviate most at a check layer, a share of them.

    The layers before the check layer are computed for X and all of S; tokens are ranked there by `‖ΔK‖²` or `‖ΔV‖²`, and the top
    share is computed in every layer. The check pass costs `check` of the model's layers over X and S.

    Attributes:
        share: Share of S that is recomputed; the paper proposes 0.15.
        check: The check layer, from 1; 1 is the second layer.
        rank: Deviation of keys or of values (**choice**: keys; the formulas leave it open).
    """

    name: ClassVar[str] = "cacheblend"
    source: ClassVar[str] = "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"

    share: float = 0.15
    check: int = 1
    rank: Literal["keys", "values"] = "keys"

    def __post_init__(self) -> None:
        check_share(self.name, "share", self.share)
        check_count(self.name, "check", self.check, 1)

    @property
    def signals(self) -> frozenset[Signal]:
        """Deviations at the check layer."""
        return frozenset({Signal.CHECK})

    @property
    def check_layer(self) -> int:
        """The check layer."""
        return self.check

    def most(self, context: PolicyContext) -> int:
        """Returns the share of S."""
        return share_of(self.share, sum(run.length for run in context.diff.suffix))

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:  # noqa: ARG002
        """Returns nothing: all is chosen from what the check layer shows."""
        return ()

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns the tokens that deviate most, the worst first."""
        error = signals.key_error if self.rank == "keys" else signals.value_error
        if error is None:
            raise ConfigError(f"{self.name} was not given the deviations of a check layer")
        rows = np.flatnonzero(suffix_rows(context.diff) & ~signals.done)
        return ranked_runs(rows, error, self.most(context))
