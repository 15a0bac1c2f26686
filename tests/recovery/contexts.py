"""Edits as policies see them, drawn at random, and the selected rows as a set."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from agentcache.recovery import PolicyContext, RecoveryPolicy
from agentcache.types import AlignedRun, Boundary, BoundaryKind, PromptDiff

UNTIMED = settings(deadline=None)
"""Other processes may take the machine for a while: no example fails for its time."""


@st.composite
def contexts(draw: st.DrawFn) -> PolicyContext:
    """Draws a prompt with aligned runs, some of them moved, boundaries, attention with many equal scores, and ages."""
    old_len = draw(st.integers(1, 120))
    runs: list[AlignedRun] = []
    new_len = 0
    if draw(st.booleans()):
        runs.append(AlignedRun(0, 0, draw(st.integers(1, old_len))))
        new_len = runs[0].length
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, old_len - 1))
        new_len += draw(st.integers(0, 20))
        runs.append(AlignedRun(start, new_len, draw(st.integers(1, min(old_len - start, 50)))))
        new_len = runs[-1].new_stop
    new_len += draw(st.integers(0, 20))
    random = np.random.default_rng(draw(st.integers(0, 9999)))
    attention, generations = np.zeros(new_len, dtype=np.float32), np.zeros(new_len, dtype=np.int32)
    for run in runs:
        attention[run.new_start : run.new_stop] = random.integers(0, 9, run.length) / 8
        generations[run.new_start : run.new_stop] = random.integers(0, 4, run.length)
    units = st.tuples(st.integers(0, new_len + 3), st.integers(0, 40))
    boundaries = tuple(
        Boundary(BoundaryKind.MESSAGE, start, start + size) for start, size in draw(st.lists(units, max_size=4))
    )
    token_ids = random.integers(0, 30, new_len).astype(np.int32)
    return PolicyContext(PromptDiff(old_len, new_len, tuple(runs)), token_ids, boundaries, attention, generations)


def edited(old_len: int = 1000, at: int = 300, removed: int = 10, new: int = 20, **measured: object) -> PolicyContext:
    """Returns one replacement: `removed` tokens became `new` ones, all others are kept."""
    runs = (AlignedRun(0, 0, at), AlignedRun(at + removed, at + new, old_len - at - removed))
    diff = PromptDiff(old_len, runs[1].new_stop, runs)
    return PolicyContext(diff, np.arange(diff.new_len, dtype=np.int32), **measured)  # type: ignore[arg-type]


def suffix(context: PolicyContext) -> set[int]:
    """Returns S."""
    return {row for run in context.diff.suffix for row in range(run.new_start, run.new_stop)}


def selected(policy: RecoveryPolicy, context: PolicyContext) -> set[int]:
    """Returns R: the aligned suffix rows that a policy selects."""
    return covered(policy.select(context)) & suffix(context)


def covered(runs: Iterable[tuple[int, int]]) -> set[int]:
    """Returns the rows of runs."""
    return {row for run in runs for row in range(*run)}


def unasked(context: PolicyContext, query: int) -> set[int]:
    """Returns the rows of S whose old position is none of the parent's last `query`."""
    return {
        run.new_start + i
        for run in context.diff.suffix
        for i in range(run.length)
        if run.old_start + i < context.diff.old_len - query
    }
