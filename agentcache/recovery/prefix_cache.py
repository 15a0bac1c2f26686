"""The exact policy: reuse only the common prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.registry import register

__all__ = ["PrefixCache"]


@register
@dataclass(frozen=True)
class PrefixCache(RecoveryPolicy):
    """Exact: restores the unchanged prefix from exact rows; the engine computes everything after it."""

    name: ClassVar[str] = "prefix_cache"
    exact: ClassVar[bool] = True
    source: ClassVar[str] = "prefix caching, as in vLLM and SGLang"

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:  # noqa: ARG002
        """Returns no runs: the planner restores nothing after the first edit."""
        return ()
