"""A diagnostic: the place that is known to matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.edit_local import first_rows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import check_count
from agentcache.types import Run

__all__ = ["CarrierWindow"]


@register
@dataclass(frozen=True)
class CarrierWindow(RecoveryPolicy):
    """Lossy: recomputes a given span of the new prompt, where an experimenter knows the answer to be, and a short window.

    CarrierWindow of EditLocal: a diagnostic that uses the true location, which nobody has in use. No upper bound.

    Attributes:
        start: First token of the carrier in the new prompt.
        stop: The token after its last.
        window: First tokens of each aligned run after an edit that are recomputed too; the paper's has none.
    """

    name: ClassVar[str] = "carrier_window"
    source: ClassVar[str] = "Contiguity, Not Importance: Budgeted Repair of Stale KV Caches After Document Edits"

    start: int = 0
    stop: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        check_count(self.name, "start", self.start, 0)
        check_count(self.name, "window", self.window, 0)
        if self.stop < self.start:
            raise ConfigError(f"{self.name}: stop={self.stop} is not allowed; take start={self.start} or more")

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the carrier, then the windows."""
        return [Run(self.start, self.stop), *first_rows(context, self.window)]
