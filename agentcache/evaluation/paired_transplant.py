"""A diagnostic policy: the rows that another policy chooses, copied from a full prefill instead of computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from agentcache.errors import ConfigError
from agentcache.recovery import get_policy, register
from agentcache.recovery.base import OnlinePolicy, PolicyContext, RecoveryPolicy, Signal, Signals
from agentcache.recovery.spec import parse_policy

__all__ = ["Transplanted"]


@register
@dataclass(frozen=True)
class Transplanted(OnlinePolicy):
    """Lossy: takes the rows that another policy would recompute from a full prefill, for which it pays.

    The second operator of EditLocal (§3 Transplant is not recomputation): the same position set, its states computed among
    correct ones. For evaluations; the engine knows it where `connector={"policy_modules": [...]}` names this module.

    Attributes:
        of: The other policy and its options, `name:option=value:…`; one that chooses once and computes what it chose.
    """

    name: ClassVar[str] = "transplanted"
    source: ClassVar[str] = "Contiguity, Not Importance: Budgeted Repair of Stale KV Caches After Document Edits"

    of: str = "edit_local"

    def __post_init__(self) -> None:
        inner = self._inner
        shifts = isinstance(inner, OnlinePolicy) and (inner.iterative or inner.probe_share is not None)
        if inner.exact or shifts or isinstance(inner, Transplanted):
            raise ConfigError(
                f"{self.name}: of={self.of!r} does not choose rows once to compute them; take another lossy policy"
            )

    @property
    def _inner(self) -> RecoveryPolicy:
        return get_policy(*parse_policy(self.of))

    @property
    def signals(self) -> frozenset[Signal]:
        """What the other policy asks for, and a full prefill."""
        inner = self._inner
        asked = inner.signals if isinstance(inner, OnlinePolicy) else frozenset()
        return asked | {Signal.EFFECT}

    @property
    def check_layer(self) -> int:
        """The other policy's."""
        inner = self._inner
        return inner.check_layer if isinstance(inner, OnlinePolicy) else super().check_layer

    @property
    def effect_block(self) -> int:
        """The other policy's if it ranks by effects; else all rows together: one forward, and nobody looks at the result."""
        inner = self._inner
        asks = isinstance(inner, OnlinePolicy) and Signal.EFFECT in inner.signals
        return inner.effect_block if isinstance(inner, OnlinePolicy) and asks else 1 << 30

    @property
    def transplants(self) -> bool:
        """Always."""
        return True

    def most(self, context: PolicyContext) -> int:
        """Returns what the other policy takes."""
        inner = self._inner
        if isinstance(inner, OnlinePolicy):
            return inner.most(context)
        return sum(stop - start for start, stop in inner.select(context))

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns what an online policy computes in any case; an offline one's choice is transplanted."""
        inner = self._inner
        return inner.select(context) if isinstance(inner, OnlinePolicy) else ()

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns the other policy's rows."""
        inner = self._inner
        return inner.choose(context, signals) if isinstance(inner, OnlinePolicy) else inner.select(context)
