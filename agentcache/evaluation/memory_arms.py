"""The ways to answer from memories, and what a share r of the reused tokens is in each policy's own setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentcache.config import PRECISIONS
from agentcache.errors import ConfigError
from agentcache.recovery import get_policy
from agentcache.recovery.spec import parse_policy

__all__ = ["FULL", "POLICIES", "SHARES", "MemoryArm", "arms_of"]

FULL: Final = "full_recompute"
"""Nothing is reused: what every other arm is compared with."""

POLICIES: Final = ("cacheblend", "prophetkv", "epic", "mean_shift", "direct_reuse", "attended")
SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.95)

_WINDOW = 16  # `attended`'s first tokens of each chunk, where the budget allows it


def _share(share: float, reused: int, chunks: int) -> dict[str, Any]:  # noqa: ARG001
    return {"share": share}


def _first_tokens(share: float, reused: int, chunks: int) -> dict[str, Any]:
    return {"k": math.ceil(share * reused / chunks)}


def _blocks(share: float, reused: int, chunks: int) -> dict[str, Any]:
    budget = math.ceil(share * reused)
    window = min(_WINDOW, budget // (2 * chunks))
    return {"window": window, "k": budget - window * chunks}


_BUDGETS: Final[dict[str, Callable[[float, int, int], dict[str, Any]]]] = {
    "cacheblend": _share,
    "prophetkv": _share,
    "mean_shift": _share,
    "epic": _first_tokens,
    "attended": _blocks,
}
"""A policy's options for a share of the reused tokens, given their number and that of the chunks.

`mean_shift` takes r for the probes of keys and r for those of values, as its paper has it, and so recomputes up to 2r; `epic`'s share
is that of the mean chunk; `attended` spends half of its budget at most on the first tokens of chunks.
"""


@dataclass(frozen=True, slots=True)
class MemoryArm:
    """One way to answer.

    Attributes:
        policy: As it was asked for, `name:option=value:…`, or `FULL`.
        share: r, or None for a policy whose budget is none or given.
        precision: How the chunks are stored.
    """

    policy: str
    share: float | None = None
    precision: str = "exact"

    @property
    def name(self) -> str:
        """In work files: unique among the arms of a run."""
        share = "" if self.share is None else f" r={self.share:g}"
        return f"{self.policy}{share}" + ("" if self.precision == "exact" else f" @{self.precision}")

    @property
    def r(self) -> float | None:
        """The share of the reused tokens that is recomputed on purpose; None where the policy decides."""
        return {FULL: 1.0, "direct_reuse": 0.0}.get(self.policy, self.share)

    def request(self, reused: int, chunks: int) -> tuple[str, dict[str, Any]]:
        """Returns the policy's name and options.

        Args:
            reused: Tokens of the chunks in the prompt.
            chunks: How many there are.
        """
        if self.policy == FULL:
            return "prefix_cache", {}
        name, options = parse_policy(self.policy)
        if self.share is not None:
            options = {**_BUDGETS[name](self.share, reused, chunks), **options}
        return name, options


def arms_of(policies: Sequence[str], shares: Sequence[float], precisions: Sequence[str]) -> list[MemoryArm]:
    """Returns the arms, full recompute first: each policy with each share and precision; one without a budget once.

    A policy whose spec gives its budget (`epic:k=32`) is taken as it is.

    Raises:
        ConfigError: A policy, option, share or precision is not allowed.
    """
    for share in shares:
        if not 0 < share < 1:
            raise ConfigError(f"share r={share} is not allowed; take shares above 0 and below 1")
    unknown = [precision for precision in precisions if precision not in PRECISIONS]
    if unknown or not precisions:
        raise ConfigError(f"precisions {unknown} are not allowed; take some of {', '.join(PRECISIONS)}")
    arms = [MemoryArm(FULL)]
    for spec in policies:
        if spec == FULL:
            continue
        name, options = parse_policy(spec)
        policy = get_policy(name, options)
        if policy.exact:
            raise ConfigError(f"policy {spec!r} is exact and takes nothing of chunks; {FULL!r} is measured in any case")
        given = _budget_is_given(name, options)
        for precision in dict.fromkeys(precisions):
            arms += [MemoryArm(spec, share, precision) for share in ((None,) if given else shares)]
    if len(arms) == 1:
        raise ConfigError("no policy is compared with full recompute; give some --policies")
    return list(dict.fromkeys(arms))


def _budget_is_given(name: str, options: Mapping[str, Any]) -> bool:
    return name not in _BUDGETS or not options.keys().isdisjoint(_BUDGETS[name](0.5, 2, 1))
