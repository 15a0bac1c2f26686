"""The window that sees for itself how far it must go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import OnlinePolicy, PolicyContext, Signal, Signals
from agentcache.recovery.length_model import LengthModel
from agentcache.recovery.patchkv import dirty_windows
from agentcache.recovery.registry import register
from agentcache.recovery.rows import check_count
from agentcache.types import Run

__all__ = ["Frontier"]

_HEAD_START = 4  # the share of a length model's window that the first step takes: two doublings reach all of it


@register
@dataclass(frozen=True)
class Frontier(OnlinePolicy):
    """Lossy: recomputes the tokens behind each edit in order, until the rows just computed agree with the stale ones.

    Ours. A run that starts at the edit reads only exact rows before it, so its rows are exact, and their agreement with the
    stale rows that they replace is a true measure of drift at its end, for free. The window grows by doubling; it ends when
    the last `calm` blocks of the run agree on average over `threshold`, or at `most_tokens`. A profile's length model only
    sizes the first step, a quarter of what it gives: it is a high quantile, behind which few edits drift, and nothing shrinks a
    step that was too long (`agentcache eval frontier`).

    Attributes:
        first: Tokens of the first step behind each edit; a profile's `length_model` replaces it.
        length_model: The first step from the lengths, a quarter of what this gives, `LengthModel.to_text()`.
        threshold: Value cosine, mean over layers, from which rows agree.
        block: Tokens whose mean is compared.
        calm: How many blocks at the run's end must agree.
        most_tokens: Most tokens behind one edit.
    """

    name: ClassVar[str] = "frontier"
    source: ClassVar[str] = "agentcache, from the contiguity of EditLocal and the drift of PatchKV"
    iterative: ClassVar[bool] = True

    first: int = 32
    length_model: str | None = None
    threshold: float = 0.995
    block: int = 16
    calm: int = 2
    most_tokens: int = 512

    def __post_init__(self) -> None:
        for option in ("first", "block", "calm", "most_tokens"):
            check_count(self.name, option, getattr(self, option), 1)
        if not -1 <= self.threshold <= 1:
            raise ConfigError(f"{self.name}: threshold={self.threshold} is not allowed; a cosine lies between -1 and 1")
        if self.length_model is not None:
            LengthModel.from_text(self.length_model)

    @property
    def signals(self) -> frozenset[Signal]:
        """Agreement of recomputed rows."""
        return frozenset({Signal.AGREEMENT})

    def most(self, context: PolicyContext) -> int:
        """Returns the tokens of all windows at their widest, less the first step."""
        return sum(min(run.length, self.most_tokens) for run in context.diff.suffix) - sum(
            stop - start for start, stop in self.select(context)
        )

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns the first step behind each edit."""
        model = None if self.length_model is None else LengthModel.from_text(self.length_model)
        windows = dirty_windows(context.diff, model, self.first)
        steps = windows if model is None else [-(-window // _HEAD_START) for window in windows]
        return [
            Run(run.new_start, min(run.new_start + min(max(step, self.block), self.most_tokens), run.new_stop))
            for run, step in zip(context.diff.suffix, steps, strict=True)
        ]

    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns the next step of each window whose end does not agree yet: as many tokens again as it has."""
        if signals.agreement is None:
            raise ConfigError(f"{self.name} was not given the agreement of its rows")
        steps = []
        for run in context.diff.suffix:
            stop = min(run.new_stop, run.new_start + self.most_tokens)
            open_rows = np.flatnonzero(~signals.done[run.new_start : stop])
            if not len(open_rows) or not open_rows[0]:
                continue  # at its end, or not begun: nothing is known of it
            end = run.new_start + int(open_rows[0])
            measured = signals.agreement[max(end - self.calm * self.block, run.new_start) : end]
            measured = measured[~np.isnan(measured)]
            blocks = np.array_split(measured[::-1], max(1, len(measured) // self.block)) if len(measured) else []
            if all(float(block.mean()) >= self.threshold for block in blocks):
                continue
            steps.append(Run(end, min(end + (end - run.new_start), stop)))
        return steps
