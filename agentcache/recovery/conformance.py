"""The check that every recovery policy must pass, shipped so that a new policy anywhere is tested by one line.

```python
def test_my_policy():
    check_policy(MyPolicy(k=8))
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import index
from typing import Any

import numpy as np

from agentcache.errors import ConfigError
from agentcache.recovery.base import OnlinePolicy, PolicyContext, RecoveryPlan, RecoveryPolicy, Signals
from agentcache.recovery.bounds import Bounded, Bounds, bounded
from agentcache.recovery.planner import plan
from agentcache.recovery.registry import declaration_fault
from agentcache.store.compose import GAP
from agentcache.types import AlignedRun, Boundary, BoundaryKind, PromptDiff, Run, complement, merge_runs

__all__ = ["Scenario", "check_plan", "check_policy", "scenarios"]


@dataclass(frozen=True)
class Scenario:
    """An old and a new prompt with the spans that they share.

    Attributes:
        title: What it exercises.
        old_ids: The parent's tokens.
        context: What the policy sees.
    """

    title: str
    old_ids: tuple[int, ...]
    context: PolicyContext


def check_policy(policy: RecoveryPolicy) -> None:
    """Checks one policy on every scenario and changes nothing.

    Declares its name, exactness and source; says in its docstring's first line when it is lossy; is frozen,
    deterministic and pure; selects integer runs, none when it is exact; its plans keep every invariant of
    `check_plan`; and it keeps the bounds that every policy takes. What it chooses in the worker is as pure, no more than it
    announces, and comes to an end. It may refuse an edit by ConfigError only where the context lacks something that it could
    have.

    Raises:
        AssertionError: Names the policy, the scenario and what does not hold.
    """
    _check_declaration(policy.policy if isinstance(policy, Bounded) else policy)
    for scenario in scenarios():
        where = f"{policy!r} on {scenario.title!r}"
        before = (repr(policy), repr(scenario.context))
        if _refuses(policy, scenario.context, where):
            continue
        selected = _selection(policy, scenario.context, where)
        _expect(_selection(policy, scenario.context, where) == selected, f"{where}: two calls of select differ")
        _expect((repr(policy), repr(scenario.context)) == before, f"{where}: select changes the policy or its context")
        _expect(not (policy.exact and selected), f"{where}: an exact policy selects nothing, got {selected}")
        if not policy.exact and not isinstance(policy, Bounded):
            _check_bounds(policy, scenario.context, selected, where)
        if isinstance(policy, OnlinePolicy):
            _check_online(policy, scenario.context, selected, where)
        for parent_exact_end, missing, limit in _parents(scenario):
            made = plan(policy, scenario.context, parent_exact_end=parent_exact_end, missing=missing, limit=limit)
            again = plan(policy, scenario.context, parent_exact_end=parent_exact_end, missing=missing, limit=limit)
            state = f"{where}, exact to {parent_exact_end}, missing {list(missing)}, limit {limit}"
            _expect(made == again, f"{state}: two equal plans differ")
            check_plan(
                made,
                scenario.context,
                scenario.old_ids,
                parent_exact_end=parent_exact_end,
                missing=missing,
                limit=limit,
                where=state,
            )
            recomputed = {row for run in made.recompute for row in range(*run)}
            kept = sorted(selected & set(range(made.load_end)) - recomputed)
            _expect(not kept, f"{state}: rows {kept[:8]} are selected but restored")
            _expect(made.exact or not policy.exact, f"{state}: an exact policy gives an approximate plan")


def check_plan(
    made: RecoveryPlan,
    context: PolicyContext,
    old_ids: Sequence[int],
    *,
    parent_exact_end: int,
    missing: Iterable[tuple[int, int]],
    limit: int,
    where: str = "plan",
) -> None:
    """Checks the invariants of one plan: tiling, limit, token identity, lost rows, counts and the exactness claim.

    Raises:
        AssertionError: Starts with `where` and says what does not hold.
    """
    new_ids, diff = context.token_ids, context.diff
    _expect(0 <= made.load_end <= limit, f"{where}: load_end {made.load_end} is not in [0, {limit}]")
    restored = [Run(run.new_start, run.new_stop) for run in made.restore]
    tiles = sorted([*restored, *made.recompute])
    edges = [0, *(run.stop for run in tiles)]
    _expect(
        [run.start for run in tiles] == edges[:-1] and edges[-1] == made.load_end,
        f"{where}: restore and recompute do not tile [0, {made.load_end}): {tiles}",
    )
    _expect(made.recompute == merge_runs(made.recompute), f"{where}: recompute is not ascending and merged")
    restored_end = restored[-1].stop if restored else 0
    _expect(restored_end == made.load_end, f"{where}: rows after the last restored one are recomputed")
    lost = {row for start, stop in missing for row in range(start, stop)}
    for run in made.restore:
        old, new = old_ids[run.old_start : run.old_stop], new_ids[run.new_start : run.new_stop]
        _expect(run.length > 0 and list(old) == list(new), f"{where}: {run} restores other tokens than the prompt has")
        _expect(lost.isdisjoint(range(run.old_start, run.old_stop)), f"{where}: {run} restores lost rows")
    counts = (made.prefix_tokens, made.fresh_tokens, made.repair_tokens, made.reused_tokens)
    _expect(min(counts) >= 0 and sum(counts) == made.load_end, f"{where}: P, X, R, F = {counts} do not sum to load_end")
    exact_end = min(diff.prefix, parent_exact_end)
    stale = [row for run in restored for row in range(*run) if row >= exact_end]
    first = stale[0] if stale else None
    _expect(made.first_approximate == first, f"{where}: first approximate row is {first}, not {made.first_approximate}")
    _expect(made.exact == (first is None), f"{where}: exact={made.exact} with first approximate row {first}")


def scenarios() -> Iterator[Scenario]:
    """Yields the edits that every policy must survive, smallest first; all prompts are shorter than 500 tokens."""
    old = tuple(range(1000, 1400))
    new = _Fresh()
    yield _scenario("one-token prompts, identical", old[:1], [(0, 1)])
    yield _scenario("one-token prompts, different", old[:1], [new(1)])
    yield _scenario("empty parent", (), [new(5)])
    yield _scenario("nothing aligned", old, [new(50)])
    yield _scenario("identical", old, [(0, 400)])
    yield _scenario("append", old, [(0, 400), new(30)])
    yield _scenario("truncation of the end", old, [(0, 150)])
    yield _scenario("replacement, same length", old, [(0, 120), new(10), (130, 400)])
    yield _scenario("replacement, longer, new turn", old, [(0, 120), new(40), (130, 400), new(25)])
    yield _scenario("replacement, shorter", old, [(0, 120), new(3), (170, 400)])
    yield _scenario("insertion", old, [(0, 200), new(16), (200, 400)])
    yield _scenario("deletion", old, [(0, 120), (190, 400)])
    yield _scenario("edit at the last token", old, [(0, 399), new(1)])
    yield _scenario("no prefix", old, [new(20), (0, 400)])
    yield _scenario("no prefix, start deleted", old, [(35, 400)])
    yield _scenario("one aligned token after the edit", old, [(0, 398), new(4), (399, 400)])
    yield _scenario("moved runs", old, [(0, 100), (200, 300), new(12), (100, 200), (300, 400), new(2)])
    yield _scenario("a run used twice", old, [(0, 100), (100, 140), new(5), (100, 140), (140, 400)])
    many = [piece for at in range(0, 400, 20) for piece in ((at, at + 17), new(1 + at % 7))]
    yield _scenario("many edits", old, many)
    # Sources behind their parent, as `store.compose` lines them up: a memory of 150 tokens and one of 49, in another order.
    parts = (*old[:199], GAP, *old[200:350], GAP, *old[351:])
    yield _scenario(
        "chunks behind a prefix", parts, [(0, 120), new(9), (351, 400), (203, 348), new(6), (351, 380), new(9)]
    )
    yield _scenario("chunks alone", parts, [new(24), (200, 350), new(2), (353, 400), new(11)])
    yield _scenario("a chunk at the very start", parts, [(200, 350), (0, 199)])
    yield _scenario("a chunk that goes on where its parent ends", parts, [(0, 199), (200, 350), new(4)])
    replaced = _scenario("replacement, nothing attended", old, [(0, 120), new(10), (130, 400)])
    nothing = np.zeros(replaced.context.diff.new_len, dtype=np.float32)
    yield replace(replaced, context=replace(replaced.context, attention=nothing))
    yield replace(replaced, title="replacement, all attended", context=replace(replaced.context, attention=nothing + 1))
    yield _unmeasured("chunks", parts, [(0, 120), new(9), (351, 400), (203, 348), new(6)])
    yield _unmeasured("append", old, [(0, 400), new(30)])
    yield _unmeasured("replacement", old, [(0, 120), new(40), (130, 400), new(25)])
    yield _unmeasured("moved runs", old, [(0, 100), (200, 300), new(12), (100, 200), (300, 400)])


class _Fresh:
    """Makes pieces of tokens that no old prompt has."""

    def __init__(self) -> None:
        self._next = 10_000

    def __call__(self, length: int) -> tuple[int, ...]:
        self._next += length
        return (-1, *range(self._next - length, self._next))


def _scenario(title: str, old: tuple[int, ...], pieces: Sequence[tuple[int, ...]]) -> Scenario:
    """Returns the scenario whose new prompt is made of pieces: an old span `(start, stop)`, or `(-1, *new tokens)`."""
    ids: list[int] = []
    aligned: list[AlignedRun] = []
    for piece in pieces:
        if piece[0] == -1:
            ids += piece[1:]
        else:
            start, stop = piece
            aligned.append(AlignedRun(start, len(ids), stop - start))
            ids += old[start:stop]
    end = len(ids)
    boundaries = (
        Boundary(BoundaryKind.MESSAGE, 0, end),
        Boundary(BoundaryKind.DOCUMENT, end // 4, end // 2),
        Boundary(BoundaryKind.TOOL_RESULT, end // 2, end),
    )
    diff = PromptDiff(len(old), end, tuple(aligned))
    draw = np.random.Generator(np.random.PCG64(end))
    attention, generations = np.zeros(end, dtype=np.float32), np.zeros(end, dtype=np.int32)
    for run in aligned:
        attention[run.new_start : run.new_stop] = draw.random(run.length, dtype=np.float32) ** 8  # a few stand out
        generations[run.new_start : run.new_stop] = (np.arange(run.old_start, run.old_stop) // 48) % 4
    token_ids = np.array(ids, dtype=np.int32)
    return Scenario(title, old, PolicyContext(diff, token_ids, boundaries, attention, generations))


def _unmeasured(title: str, old: tuple[int, ...], pieces: Sequence[tuple[int, ...]]) -> Scenario:
    """Returns a scenario whose context has what it must have and no more."""
    full = _scenario(f"{title}, unmeasured", old, pieces)
    return replace(full, context=PolicyContext(full.context.diff, tuple(map(int, full.context.token_ids))))


def _parents(scenario: Scenario) -> Iterator[tuple[int, tuple[Run, ...], int]]:
    """Yields states of the parent: its exact rows, its lost rows and how many rows may be loaded."""
    old, new = len(scenario.old_ids), len(scenario.context.token_ids)
    losses = ((), (Run(old - 1, old),), (Run(3, 9), Run(old // 2, old // 2 + 40)), (Run(0, old),))
    for exact, missing, limit in product((old, 0, old // 3), losses, {new - 1, new // 2, 0}):
        yield exact, tuple(run for run in missing if 0 <= run.start < run.stop <= old), limit


def _check_declaration(policy: RecoveryPolicy) -> None:
    kind = type(policy)
    fault = declaration_fault(kind)
    _expect(fault is None, f"{kind.__qualname__}: {fault}")
    first_line = (kind.__doc__ or "").strip().partition("\n")[0].lower()
    _expect(policy.exact or "lossy" in first_line, f"{kind.__qualname__}: the docstring's first line must say 'lossy'")
    options = {field.name: getattr(policy, field.name) for field in fields(policy)}  # type: ignore[arg-type]
    for option, value in options.items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        _expect(plain, f"{kind.__qualname__}.{option}={value!r} is no plain JSON value")
    _expect(kind(**options) == policy, f"{policy!r} is not rebuilt by its own options")


def _refuses(policy: RecoveryPolicy, context: PolicyContext, where: str) -> bool:
    """Returns whether a policy refuses a context, which it may only when that lacks something and rows follow an edit."""
    try:
        list(policy.select(context))
    except ConfigError as error:
        lacks = context.attention is None or context.generations is None or not context.boundaries
        _expect(lacks, f"{where}: it refuses a context that lacks nothing: {error}")
        _expect(bool(context.diff.suffix), f"{where}: it refuses where nothing follows an edit: {error}")
        return True
    return False


def _check_bounds(policy: RecoveryPolicy, context: PolicyContext, free: set[int], where: str) -> None:
    """Checks that a policy, which selects rows `free`, takes as many of them as a budget allows, and all that are too old."""
    suffix = {row for run in context.diff.suffix for row in range(run.new_start, run.new_stop)}
    for bounds, budget in ((Bounds(max_tokens=9), 9), (Bounds(max_share=0.1), len(suffix) // 10)):
        kept = _selection(bounded(policy, bounds), context, where)
        _expect(kept <= free, f"{where}: with {bounds} it selects other rows: {sorted(kept - free)[:8]}")
        _expect(
            len(kept) == min(budget, len(free)), f"{where}: with {bounds} it selects {len(kept)} rows of {len(free)}"
        )
    if context.generations is not None:
        old = {row for row in suffix if context.generations[row] >= 2}
        kept = _selection(bounded(policy, Bounds(max_generations=2)), context, where)
        _expect(kept == free | old, f"{where}: rows {sorted(kept ^ (free | old))[:8]} do not follow from their age")


def _check_online(policy: OnlinePolicy, context: PolicyContext, selected: set[int], where: str) -> None:
    """Checks what a policy, which selects rows `selected`, chooses in the worker: alone, and within a budget."""
    free = _rounds(policy, context, selected, where)
    most = policy.most(context)
    _expect(len(free) <= most, f"{where}: it chooses {len(free)} rows and announced {most} at most")
    for bounds, budget in ((Bounds(max_tokens=9), 9), (Bounds(max_tokens=0), 0)):
        limited = bounded(policy, bounds)
        _expect(isinstance(limited, OnlinePolicy), f"{where}: within {bounds} it does not choose in the worker")
        assert isinstance(limited, OnlinePolicy)
        kept = _selection(limited, context, where)
        both = kept | _rounds(limited, context, kept, where)
        _expect(len(both) <= budget, f"{where}: with {bounds} it takes {len(both)} rows, {budget} are allowed")


def _rounds(policy: OnlinePolicy, context: PolicyContext, selected: set[int], where: str) -> set[int]:
    """Returns the rows of S that a policy chooses from made-up signals, as the worker asks it."""
    suffix = {row for run in context.diff.suffix for row in range(run.new_start, run.new_stop)}
    draw = np.random.Generator(np.random.PCG64(context.diff.new_len))
    inside = np.isin(np.arange(context.diff.new_len), sorted(suffix))

    def scores() -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.where(inside, draw.random(len(inside), dtype=np.float32), np.float32(0))

    measured = [scores() for _ in range(6)]
    agreement = np.full(len(inside), np.nan, dtype=np.float32)
    agreed = 1 - 0.2 * scores()
    chosen: set[int] = set()
    for _ in range(len(inside) + 2):
        done = np.isin(np.arange(len(inside)), sorted((selected & suffix) | chosen))
        agreement[done] = agreed[done]
        query, key_deviation, value_deviation, key_error, value_error, effect = measured
        signals = Signals(done, query, key_deviation, value_deviation, key_error, value_error, agreement.copy(), effect)
        before = [field.copy() for field in (signals.done, *measured)]
        runs = [(index(a), index(b)) for a, b in policy.choose(context, signals)]
        again = [(index(a), index(b)) for a, b in policy.choose(context, signals)]
        _expect(runs == again, f"{where}: two calls of choose differ")
        same = all(np.array_equal(a, b) for a, b in zip(before, (signals.done, *measured), strict=True))
        _expect(same, f"{where}: choose changes its signals")
        new = {row for run in merge_runs(runs) for row in range(*run)} & suffix - chosen - selected
        chosen |= new
        if not new or not policy.iterative:
            return chosen
    raise AssertionError(f"{where}: choose finds no end")


def _selection(policy: RecoveryPolicy, context: PolicyContext, where: str) -> set[int]:
    """Returns the aligned suffix rows that a policy selects."""
    runs = [(index(start), index(stop)) for start, stop in policy.select(context)]
    _expect(all(start <= stop for start, stop in runs), f"{where}: a run ends before it starts: {runs}")
    suffix = merge_runs((run.new_start, run.new_stop) for run in context.diff.suffix)
    outside = complement(suffix, context.diff.new_len)
    chosen = {row for run in merge_runs(runs) for row in range(*run) if 0 <= row < context.diff.new_len}
    return chosen - {row for run in outside for row in range(*run)}


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
