"""A diagnostic: the blocks that matter most, known from a full prefill."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.attention_blocks import rank_by_mean
from agentcache.recovery.base import OnlinePolicy, PolicyContext, Signal, Signals
from agentcache.recovery.query import query_rows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import block_runs, blocks_within, by_block, check_count, suffix_rows

__all__ = ["CausalOracle"]


@register
@dataclass(frozen=True)
class CausalOracle(OnlinePolicy):
    """Lossy: the blocks of the aligned suffix whose exact rows, put in place one block at a time, change the answer most.

    A diagnostic: it pays for a full prefill and for a forward a block. EditLocal ranks positions by transplant and finds that
    the same sets behave differently when they are recomputed among stale rows: both operators are here.

    Attributes:
        k: Most tokens.
        block: Tokens a block.
        operator: `"recompute"`, as any policy that can be deployed; `"transplant"` copies the rows of the full prefill.
    """

    name: ClassVar[str] = "causal_oracle"
    source: ClassVar[str] = "Contiguity, Not Importance: Budgeted Repair of Stale KV Caches After Document Edits"

    k: int = 32
    block: int = 8
    operator: Literal["recompute", "transplant"] = "recompute"

    def __post_init__(self) -> None:
        check_count(self.name, "k", self.k, 0)
        check_count(self.name, "block", self.block, 1)

    @property
    def signals(self) -> frozenset[Signal]:
        """Causal effects."""
        return frozenset({Signal.EFFECT})

    @property
    def effect_block(self) -> int:
        """Tokens that are transplanted together."""
        return self.block

    @property
    def transplants(self) -> bool:
        """Whether the operator is transplant."""
        return self.operator == "transplant"

    def most(self, context: PolicyContext) -> int:  # noqa: ARG002
        """Returns k."""
        return self.k

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the query."""
        return [query_rows(context)] if context.diff.suffix else ()

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns the blocks of the largest effect, best first."""
        if signals.effect is None:
            raise ConfigError(f"{self.name} was not given the effects of its blocks")
        candidates = suffix_rows(context.diff) & ~signals.done
        ranked = rank_by_mean(signals.effect.astype(np.float32), candidates, self.block)
        costs = by_block(candidates, self.block, fill=False).sum(axis=1)
        return block_runs(blocks_within(ranked, costs, self.k), self.block)
