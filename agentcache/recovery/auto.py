"""Another policy where it saves time, prefix caching where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.bounds import Bounded, bounded
from agentcache.recovery.registry import get_policy, register
from agentcache.recovery.spec import parse_policy

__all__ = ["Auto", "auto_arms", "auto_candidate"]


@register
@dataclass(frozen=True)
class Auto(RecoveryPolicy):
    """Lossy where that saves time: another policy, or exact prefix caching where the saving is estimated to be too small.

    Never much slower than prefix caching: short suffixes, slow tiers and repairs that cost as much as a prefill are computed
    exactly. The engine plans both, and compares them by its cost model (`engine.costs`); choice and estimate are in the report.

    Attributes:
        candidate: The other policy and its options, `name` or `name:option=value:…`, bounds too.
        margin: Share of prefix caching's time that it must save.
    """

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "agentcache"

    candidate: str = "edit_local"
    margin: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ConfigError(f"auto: margin={self.margin} is not allowed; take a share from 0, below 1")
        if parse_policy(self.candidate)[0] == self.name:
            raise ConfigError(f"auto: candidate={self.candidate!r} is itself; take a lossy policy, e.g. 'edit_local'")
        if self.lossy.exact:
            raise ConfigError(
                f"auto: candidate={self.candidate!r} is exact, as is what it would be compared with; take a lossy policy"
            )

    @property
    def lossy(self) -> RecoveryPolicy:
        """The other policy."""
        return get_policy(*parse_policy(self.candidate))

    def accepts(self, exact_s: float, lossy_s: float) -> bool:
        """Returns whether the other policy saves enough of prefix caching's time."""
        return lossy_s < (1 - self.margin) * exact_s

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns what the other policy selects."""
        return self.lossy.select(context)


def auto_arms(policy: RecoveryPolicy) -> tuple[Auto, RecoveryPolicy] | None:
    """Returns `auto` and its other policy, within the bounds that `auto` was given; None when the policy is another one."""
    if isinstance(policy, Auto):
        return policy, policy.lossy
    if isinstance(policy, Bounded) and isinstance(policy.policy, Auto):
        return policy.policy, bounded(policy.policy.lossy, policy.bounds)
    return None


def auto_candidate(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns name and options of the other policy, given the options of `auto`."""
    return parse_policy(str(options.get("candidate", Auto.candidate)))
