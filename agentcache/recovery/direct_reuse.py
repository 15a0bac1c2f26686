"""The other end of the scale: reuse every aligned token as it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.registry import register

__all__ = ["DirectReuse"]


@register
@dataclass(frozen=True)
class DirectReuse(RecoveryPolicy):
    """Lossy: restores the whole aligned suffix and recomputes none of it (R is empty).

    Rows after the edit still encode the old text. A baseline and a lower bound of cost; selection costs nothing.
    """

    name: ClassVar[str] = "direct_reuse"
    source: ClassVar[str] = "the stale-cache arm of Contiguity/EditLocal and PatchKV"

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:  # noqa: ARG002
        """Returns no runs: every aligned token is reused."""
        return ()
