"""AgentKVShift: a few probes tell how far all other tokens have shifted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import OnlinePolicy, PolicyContext, RecoveryPolicy, Signal, Signals
from agentcache.recovery.registry import get_policy, register
from agentcache.recovery.rows import Scores, check_count, check_share, ranked_runs, share_of, suffix_rows

__all__ = ["MeanShift"]

_DEVIATION = "deviation"
_WEIGHTS = ("relative", "absolute")


@register
@dataclass(frozen=True)
class MeanShift(OnlinePolicy):
    r"""Lossy: recomputes a few probe tokens of each aligned run and shifts the other tokens' K/V by what those deviate by on average.

    ```
    d_j = ‖fresh − reuse‖ / ‖fresh‖ at the check layer, for K and V                 AgentKVShift 1 (**choice**: relative L2)
    S_K, S_V = the b = ⌈r·n⌉ tokens of largest d_K, d_V of a run of n                AgentKVShift 2
    K_corr,j = K_reuse,j + min(d_K,j, 1)·mean_{S_K}(K_fresh − K_reuse), V likewise   AgentKVShift 3 and 4, in every layer
    ```

    Any other policy may choose the probes: its rows then estimate the mean. The check pass costs `check` of the model's layers
    over X and S; the shift reads and writes all of S once a layer. The shift lives in the request's pages: what its checkpoint
    stores of those rows are the parent's own.

    Attributes:
        share: r.
        selector: `"deviation"`, or the policy that chooses the rows to recompute, with its default options.
        check: l_c, from 1; the paper's is 1, the second layer.
        weight: What d is in the weights: `"relative"` as above, or `"absolute"`, ‖fresh − reuse‖, by which most rows are shifted by
            the whole mean. The paper does not say which; the choice of probes does not depend on it.
    """

    name: ClassVar[str] = "mean_shift"
    source: ClassVar[str] = "AgentKVShift"

    share: float = 0.1
    selector: str = _DEVIATION
    check: int = 1
    weight: str = "relative"

    def __post_init__(self) -> None:
        check_share(self.name, "share", self.share)
        check_count(self.name, "check", self.check, 1)
        if self.weight not in _WEIGHTS:
            raise ConfigError(f"{self.name}: weight={self.weight!r} is not known; take {' or '.join(_WEIGHTS)}")
        if self.selector == self.name:
            raise ConfigError(
                f"{self.name}: selector={self.selector!r} is itself; take {_DEVIATION!r} or another policy"
            )
        inner = self._inner
        if inner is not None and (inner.exact or (isinstance(inner, OnlinePolicy) and not _at_once(inner))):
            raise ConfigError(
                f"{self.name}: selector={self.selector!r} does not choose rows once; take {_DEVIATION!r} or a lossy policy that does"
            )

    @property
    def _inner(self) -> RecoveryPolicy | None:
        return None if self.selector == _DEVIATION else get_policy(self.selector)

    @property
    def signals(self) -> frozenset[Signal]:
        """Deviations at the check layer, and what the selector asks for."""
        inner = self._inner
        return frozenset({Signal.CHECK}) | (inner.signals if isinstance(inner, OnlinePolicy) else frozenset())

    @property
    def check_layer(self) -> int:
        """l_c."""
        return self.check

    @property
    def probe_share(self) -> float:
        """r, or all rows of another selector."""
        return self.share if self._inner is None else 1.0

    def shift_weights(self, signals: Signals) -> tuple[Scores, Scores]:
        """Returns `min(d, 1)` of each row, for keys and values (AgentKVShift 2)."""
        if self.weight == "relative":
            return super().shift_weights(signals)
        assert signals.key_error is not None and signals.value_error is not None, "a check layer was not asked for"
        return np.minimum(np.sqrt(signals.key_error), 1), np.minimum(np.sqrt(signals.value_error), 1)

    def most(self, context: PolicyContext) -> int:
        """Returns the tokens of both probe sets, or what the selector takes."""
        inner, suffix = self._inner, context.diff.suffix
        if isinstance(inner, OnlinePolicy):
            return inner.most(context)
        if inner is not None:
            return sum(stop - start for start, stop in inner.select(context))
        return sum(min(2 * share_of(self.share, run.length), run.length) for run in suffix)

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the rows that an online selector takes in any case; they are no probes."""
        inner = self._inner
        return inner.select(context) if isinstance(inner, OnlinePolicy) else ()

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns S_K and S_V of each aligned run, or what the selector takes."""
        inner = self._inner
        if isinstance(inner, OnlinePolicy):
            return inner.choose(context, signals)
        if inner is not None:
            return inner.select(context)
        if signals.key_deviation is None or signals.value_deviation is None:
            raise ConfigError(f"{self.name} was not given the deviations of a check layer")
        free = suffix_rows(context.diff) & ~signals.done
        runs: list[tuple[int, int]] = []
        for run in context.diff.suffix:
            rows = np.flatnonzero(free[run.new_start : run.new_stop]) + run.new_start
            for deviation in (signals.key_deviation, signals.value_deviation):
                runs += ranked_runs(rows, deviation, share_of(self.share, len(rows)))
        return runs


def _at_once(policy: OnlinePolicy) -> bool:
    """Whether a policy chooses once, and its rows are computed by the model."""
    return not policy.iterative and not policy.transplants and policy.probe_share is None
