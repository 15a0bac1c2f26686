"""The paper's window that needs no budget: to the end of the unit that the edit lies in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.edit_local import EditLocal, rows_to_boundary
from agentcache.recovery.registry import register

__all__ = ["EditLocalBoundary"]


@register
@dataclass(frozen=True)
class EditLocalBoundary(RecoveryPolicy):
    """Lossy: recomputes from each edit to the end of the message, tool result or document that it lies in.

    EditLocal@∂ (§5 How Far the Window Should Extend; formulas, EditLocal 5); the same as `edit_local` with `to="boundary"`,
    under the name that comparisons use. Selection reads only positions and costs no forward pass.
    """

    name: ClassVar[str] = "edit_local_boundary"
    source: ClassVar[str] = EditLocal.source

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns one run for each edit, ascending."""
        return rows_to_boundary(context)
