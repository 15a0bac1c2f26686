"""The tokens that separate things."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import PolicyContext, RecoveryPolicy
from agentcache.recovery.registry import register
from agentcache.recovery.rows import Mask, block_runs, check_count, distances, suffix_rows

__all__ = ["Structural"]


@register
@dataclass(frozen=True)
class Structural(RecoveryPolicy):
    """Lossy: recomputes delimiter tokens after each edit, nearest first, and restores the text between them as it is.

    The paper's Structural (§3 Selection policies; formulas, EditLocal 5) after Li 2026, who finds that models take notes at
    delimiters. Which tokens delimit is **our choice**, since the text at hand leaves its list out: the first and the last
    `edge` tokens of each message, tool result and document (there stand the chat template's markers), and every token that
    `ids` names. So is the order, by distance to the edit before it. Selection costs no forward pass.

    Attributes:
        k: Most tokens that are recomputed.
        edge: Tokens at either end of each unit that count as delimiters.
        ids: Further delimiter token ids as text, e.g. `"198, 271"` for what a tokenizer makes of line breaks.
    """

    name: ClassVar[str] = "structural"
    source: ClassVar[str] = (
        "the structural arm of Contiguity/EditLocal, after Models Take Notes at Prefill: KV Cache Can Be Editable and Composable"
    )

    k: int = 32
    edge: int = 1
    ids: str = ""

    def __post_init__(self) -> None:
        check_count(self.name, "k", self.k, 0)
        check_count(self.name, "edge", self.edge, 0)
        self._delimiters()

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns single tokens, nearest first.

        Raises:
            ConfigError: Something follows an edit, but nothing says what delimits there.
        """
        diff = context.diff
        if not diff.suffix:
            return ()
        if not self.ids and not context.boundaries:
            raise ConfigError(
                "policy 'structural' knows no delimiters: the request carries no boundaries; send them, or give ids='198, …'"
            )
        rows = np.flatnonzero(suffix_rows(diff) & self._structural(context))
        nearest = rows[np.argsort(distances(diff)[rows], kind="stable")]
        return block_runs(nearest[: self.k], 1)

    def _structural(self, context: PolicyContext) -> Mask:
        """Returns which rows are delimiters, bool `[T]`."""
        found = np.isin(np.asarray(context.token_ids), self._delimiters())
        for unit in context.boundaries:
            found[unit.start : min(unit.start + self.edge, unit.stop)] = True
            found[max(unit.stop - self.edge, unit.start) : unit.stop] = True
        return found

    def _delimiters(self) -> list[int]:
        try:
            return [int(part) for part in self.ids.replace(",", " ").split()]
        except ValueError:
            raise ConfigError(
                f"structural: ids={self.ids!r} is not allowed; take token ids with commas, e.g. '198, 271'"
            ) from None
