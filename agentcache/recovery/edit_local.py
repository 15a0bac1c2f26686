"""EditLocal and EditLocal@∂ (Contiguity, Not Importance): recompute a contiguous window after each edit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.registry import register
from agentcache.types import Boundary, Run

__all__ = ["DEFAULT_K", "EditLocal", "first_rows", "rows_to_boundary"]

DEFAULT_K = 32
"""The primary budget of the paper."""


@register
@dataclass(frozen=True)
class EditLocal(RecoveryPolicy):
    """Lossy: recomputes a window right after each edit and restores the rest of the aligned suffix as it is.

    Text that depends on the edit from further away stays stale (margin recovery 0.01–0.09 at 250 tokens and more in the
    paper). Selection reads only positions and costs no forward pass.

    Attributes:
        k: First tokens of each aligned run after an edit that are recomputed (the paper's EditLocal, K downstream
            positions, §3 Selection policies). 32 when neither `k` nor `to` is given.
        to: `"boundary"` recomputes instead to the end of the unit that the edit lies in (EditLocal@∂, §5 How far the
            window should extend). **choice**, since the paper's blocks do not nest: the innermost message, tool result
            or document that holds all new tokens of the edit, else the innermost that holds the last of them.
    """

    name: ClassVar[str] = "edit_local"
    source: ClassVar[str] = "Contiguity, Not Importance: Budgeted Repair of Stale KV Caches After Document Edits"

    k: int | None = None
    to: Literal["boundary"] | None = None

    def __post_init__(self) -> None:
        if self.k is None and self.to is None:
            object.__setattr__(self, "k", DEFAULT_K)
        elif self.k is not None and self.to is not None:
            raise ConfigError(f"edit_local takes k={self.k} or to={self.to!r}, not both; leave one out")
        if self.k is not None and self.k < 0:
            raise ConfigError(f"edit_local: k={self.k} is not allowed; take a number of tokens, 0 or more")

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns one window for each aligned run that follows an edit, ascending."""
        return first_rows(context, self.k) if self.k is not None else rows_to_boundary(context)


def first_rows(context: PolicyContext, k: int) -> list[Run]:
    """Returns the first k rows of each aligned run that follows an edit, ascending."""
    return [Run(run.new_start, min(run.new_start + k, run.new_stop)) for run in context.diff.suffix]


def rows_to_boundary(context: PolicyContext) -> Iterator[Run]:
    """Yields, for each join, the run from it to the end of the unit that the edit before it lies in.

    A deletion leaves no token behind: it lies where the token after it stands. No tokens where no unit holds the edit,
    or where the edit reaches its unit's end.
    """
    units = sorted(context.boundaries, key=lambda unit: unit.start)
    opened, open_units = 0, list[Boundary]()
    edit_start = context.diff.prefix
    for run in context.diff.suffix:
        join = run.new_start
        last = max(join - 1, edit_start)
        while opened < len(units) and units[opened].start <= last:
            open_units.append(units[opened])
            opened += 1
        open_units = [unit for unit in open_units if unit.stop > last]
        whole = [unit for unit in open_units if unit.start <= edit_start] or open_units
        if whole:
            innermost = min(whole, key=lambda unit: unit.stop - unit.start)
            yield Run(join, innermost.stop)
        edit_start = run.new_stop
