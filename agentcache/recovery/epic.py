"""The first tokens of everything that is reused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.edit_local import first_rows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import check_count

__all__ = ["Epic"]


@register
@dataclass(frozen=True)
class Epic(RecoveryPolicy):
    """Lossy: recomputes the first k tokens of each reused run and restores the rest of it as it is.

    EPIC repairs the tokens that served as attention sinks when a chunk was encoded on its own. The reused runs of an edited
    prompt are its aligned suffix, so there it selects what `edit_local` with the same k selects, and shares its code; it is a
    name of its own because the two papers differ in what they reuse, and in the k that they propose. Selection costs no
    forward pass.

    Attributes:
        k: First tokens of each run, formulas: EPIC (the paper's LegoLink); it proposes 32 or 128.
    """

    name: ClassVar[str] = "epic"
    source: ClassVar[str] = "EPIC: Efficient Position-Independent Caching for Serving Large Language Models"

    k: int = 32

    def __post_init__(self) -> None:
        check_count(self.name, "k", self.k, 0)

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the first rows of each aligned run that follows an edit, ascending."""
        return first_rows(context, self.k)
