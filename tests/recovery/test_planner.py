"""The planner against a slow reference that decides every row for itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.recovery import DirectReuse, EditLocal, PolicyContext, PrefixCache, RecoveryPlan, RecoveryPolicy, plan
from agentcache.recovery.conformance import check_plan
from agentcache.types import AlignedRun, PromptDiff, Run
from tests.recovery.contexts import UNTIMED


@dataclass(frozen=True)
class Chosen(RecoveryPolicy):
    """Lossy: selects whatever a test says."""

    name: ClassVar[str] = "chosen"
    source: ClassVar[str] = "a test"
    runs: tuple[tuple[int, int], ...] = ()

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        return self.runs


@dataclass(frozen=True)
class Case:
    old: list[int]
    context: PolicyContext
    parent_exact_end: int
    missing: tuple[Run, ...]
    limit: int

    def plan(self, policy: RecoveryPolicy) -> RecoveryPlan:
        return plan(
            policy,
            self.context,
            parent_exact_end=self.parent_exact_end,
            missing=self.missing,
            limit=self.limit,
        )


@dataclass(frozen=True)
class Row:
    """What becomes of one row of `[0, load_end)`."""

    source: int | None
    kind: str
    exact: bool


def reference(policy: RecoveryPolicy, case: Case) -> list[Row]:
    """Decides row by row, by the definition of exactness and nothing else."""
    new, old = list(case.context.token_ids), case.old
    source = {run.new_start + i: run.old_start + i for run in case.context.diff.aligned for i in range(run.length)}
    lost = {row for run in case.missing for row in range(*run)}
    chosen = {row for start, stop in policy.select(case.context) for row in range(start, stop)}

    def in_prefix(row: int) -> bool:
        return source.get(row) == row and old[: row + 1] == new[: row + 1]

    def exact_when_restored(row: int) -> bool:
        return in_prefix(row) and row < case.parent_exact_end

    restored = []
    for row in range(case.limit):
        present = row in source and source[row] not in lost
        if policy.exact and not (present and exact_when_restored(row)):
            break
        if present and (in_prefix(row) or row not in chosen):
            restored.append(row)
    rows: list[Row] = []
    for row in range(restored[-1] + 1 if restored else 0):
        if row in restored:
            kind = "prefix" if in_prefix(row) else "reused"
            rows.append(Row(source[row], kind, exact_when_restored(row)))
        else:
            kind = "repair" if row in source else "fresh"
            rows.append(Row(None, kind, all(before.exact for before in rows)))
    return rows


@st.composite
def cases(draw: st.DrawFn, alphabet: int | None = None) -> Case:
    """Draws an old prompt, a new one made of its spans and of new tokens, and a state of the parent.

    Without an alphabet every token differs, so that the common prefix is as long as the diff says.
    """
    old_len = draw(st.integers(0, 40))
    old = list(range(old_len)) if alphabet is None else [draw(st.integers(0, alphabet - 1)) for _ in range(old_len)]
    new: list[int] = []
    aligned: list[AlignedRun] = []
    at = 0
    for _ in range(draw(st.integers(0, 6))):
        inserted = draw(st.integers(0, 5))
        if alphabet is None:
            new += range(10_000 + len(new), 10_000 + len(new) + inserted)
        else:
            new += [draw(st.integers(0, alphabet)) for _ in range(inserted)]
        deleted = draw(st.one_of(st.just(inserted), st.integers(0, 4)))
        start = draw(st.sampled_from([min(at + deleted, old_len)] * 3 + [draw(st.integers(0, old_len))]))
        length = draw(st.integers(0, min(15, old_len - start)))
        if length:
            piece = AlignedRun(start, len(new), length)
            if aligned and (aligned[-1].old_stop, aligned[-1].new_stop) == (start, len(new)):
                piece = replace_last(aligned, length)
            aligned.append(piece)
            new += old[start : start + length]
        at = start + length
    diff = PromptDiff(old_len, len(new), tuple(aligned))
    spans = st.tuples(st.integers(0, old_len), st.integers(0, 6)).map(lambda s: Run(s[0], min(s[0] + s[1], old_len)))
    return Case(
        old,
        PolicyContext(diff, new),
        parent_exact_end=draw(st.one_of(st.just(old_len), st.integers(0, old_len))),
        missing=tuple(draw(st.lists(spans, max_size=3))),
        limit=draw(st.one_of(st.just(max(len(new) - 1, 0)), st.integers(0, len(new)))),
    )


def replace_last(aligned: list[AlignedRun], length: int) -> AlignedRun:
    """Takes the last run off and returns it longer: a diff never splits what is contiguous in both prompts."""
    last = aligned.pop()
    return last._replace(length=last.length + length)


policies = st.one_of(
    st.just(PrefixCache()),
    st.just(DirectReuse()),
    st.integers(0, 12).map(lambda k: EditLocal(k=k)),
    st.lists(st.tuples(st.integers(-5, 60), st.integers(-5, 60)), max_size=6).map(lambda runs: Chosen(tuple(runs))),
)


@UNTIMED
@given(case=cases(), policy=policies)
def test_a_plan_is_what_the_definition_says_row_by_row(case: Case, policy: RecoveryPolicy) -> None:
    made = case.plan(policy)
    rows = reference(policy, case)
    assert made.load_end == len(rows)
    sources = {run.new_start + i: run.old_start + i for run in made.restore for i in range(run.length)}
    assert sources == {at: row.source for at, row in enumerate(rows) if row.source is not None}
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ("prefix", "fresh", "repair", "reused")}
    assert (made.prefix_tokens, made.fresh_tokens, made.repair_tokens, made.reused_tokens) == tuple(counts.values())
    first = next((at for at, row in enumerate(rows) if not row.exact), None)
    assert (made.first_approximate, made.exact) == (first, first is None)


@UNTIMED
@given(case=cases(), policy=policies)
def test_every_row_after_the_first_approximate_one_is_approximate(case: Case, policy: RecoveryPolicy) -> None:
    exact = [row.exact for row in reference(policy, case)]
    assert exact == sorted(exact, reverse=True)


@UNTIMED
@given(case=cases(alphabet=2), policy=policies)
def test_no_row_is_called_exact_that_is_not_even_when_the_diff_misses_common_tokens(
    case: Case, policy: RecoveryPolicy
) -> None:
    made = case.plan(policy)
    exact_end = made.load_end if made.first_approximate is None else made.first_approximate
    source = {run.new_start + i: run.old_start + i for run in made.restore for i in range(run.length)}
    for row in range(exact_end):
        if row in source:
            assert source[row] == row < case.parent_exact_end
            assert case.old[: row + 1] == list(case.context.token_ids)[: row + 1]


@UNTIMED
@given(case=cases(alphabet=3), policy=policies)
def test_every_plan_keeps_the_shipped_invariants(case: Case, policy: RecoveryPolicy) -> None:
    check_plan(
        case.plan(policy),
        case.context,
        case.old,
        parent_exact_end=case.parent_exact_end,
        missing=case.missing,
        limit=case.limit,
    )


@UNTIMED
@given(case=cases(), policy=policies)
def test_equal_plans_have_equal_digests_and_other_plans_others(case: Case, policy: RecoveryPolicy) -> None:
    made = case.plan(policy)
    assert made == case.plan(policy)
    shorter = replace(case, limit=max(case.limit - 3, 0)).plan(policy)
    assert (shorter.digest == made.digest) == ((shorter.restore, shorter.load_end) == (made.restore, made.load_end))
    assert len(made.digest) == 32


def context(*aligned: tuple[int, int, int], old_len: int = 1000, new_len: int = 1010) -> PolicyContext:
    diff = PromptDiff(old_len, new_len, tuple(AlignedRun(*run) for run in aligned))
    return PolicyContext(diff, range(new_len))


EDITED = context((0, 0, 300), (310, 320, 690))  # [300, 320) is new


def test_the_exact_policy_restores_the_prefix_and_nothing_else() -> None:
    made = plan(PrefixCache(), EDITED, parent_exact_end=1000, limit=1009)
    assert (made.restore, made.recompute, made.load_end) == ((AlignedRun(0, 0, 300),), (), 300)
    assert (made.exact, made.first_approximate) == (True, None)


@pytest.mark.parametrize(
    ("parent_exact_end", "missing", "limit", "end"),
    [(200, [], 1009, 200), (1000, [(150, 160), (10, 12)], 1009, 10), (1000, [(400, 500)], 99, 99), (0, [], 1009, 0)],
)
def test_the_exact_policy_stops_at_the_first_row_that_is_not_both_exact_and_there(
    parent_exact_end: int, missing: list[tuple[int, int]], limit: int, end: int
) -> None:
    made = plan(PrefixCache(), EDITED, parent_exact_end=parent_exact_end, missing=missing, limit=limit)
    assert (made.load_end, made.prefix_tokens, made.exact) == (end, end, True)


def test_the_exact_policy_never_asks_select() -> None:
    @dataclass(frozen=True)
    class Greedy(PrefixCache):
        """Exact in name only."""

        def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
            raise AssertionError("select was asked")

    assert plan(Greedy(), EDITED, parent_exact_end=1000, limit=1009).load_end == 300


def test_edit_local_recomputes_the_middle_and_the_window_and_restores_the_rest_shifted() -> None:
    made = plan(EditLocal(k=32), EDITED, parent_exact_end=1000, limit=1009)
    assert made.recompute == (Run(300, 352),)
    assert made.restore == (AlignedRun(0, 0, 300), AlignedRun(342, 352, 657))
    assert (made.prefix_tokens, made.fresh_tokens, made.repair_tokens, made.reused_tokens) == (300, 20, 32, 657)


def test_rows_recomputed_right_behind_an_exact_prefix_stay_exact() -> None:
    made = plan(EditLocal(k=32), EDITED, parent_exact_end=1000, limit=1009)
    assert (made.first_approximate, made.exact) == (352, False)


def test_a_recomputed_run_behind_an_approximate_row_is_approximate() -> None:
    made = plan(EditLocal(k=32), EDITED, parent_exact_end=250, limit=1009)
    assert made.first_approximate == 250


def test_lost_rows_are_recomputed_where_they_stand_in_the_new_prompt() -> None:
    made = plan(DirectReuse(), EDITED, parent_exact_end=1000, missing=[(290, 320), (999, 1000)], limit=1009)
    assert made.recompute == (Run(290, 330),)
    assert (made.load_end, made.repair_tokens, made.first_approximate) == (1009, 20, 330)


def test_the_plan_ends_at_the_last_restored_row_so_that_the_rest_is_the_engines() -> None:
    made = plan(Chosen(runs=((900, 1010),)), EDITED, parent_exact_end=1000, limit=1009)
    assert (made.load_end, made.recompute) == (900, (Run(300, 320),))


def test_a_suffix_that_did_not_move_is_reused_and_is_no_prefix() -> None:
    made = plan(DirectReuse(), context((0, 0, 300), (310, 310, 690)), parent_exact_end=1000, limit=1009)
    assert (made.prefix_tokens, made.reused_tokens, made.first_approximate) == (300, 690, 310)


def test_selecting_the_whole_suffix_leaves_the_exact_prefix() -> None:
    made = plan(Chosen(runs=((0, 5000),)), EDITED, parent_exact_end=1000, limit=1009)
    assert (made.restore, made.recompute, made.exact) == ((AlignedRun(0, 0, 300),), (), True)


def test_an_append_only_child_recomputes_nothing_and_is_as_exact_as_its_parent() -> None:
    child = context((0, 0, 1000), new_len=1200)
    exact = plan(EditLocal(), child, parent_exact_end=1000, limit=1199)
    assert (exact.load_end, exact.recompute, exact.exact) == (1000, (), True)
    stale = plan(EditLocal(), child, parent_exact_end=700, limit=1199)
    assert (stale.load_end, stale.recompute, stale.first_approximate) == (1000, (), 700)


def test_a_moved_run_is_approximate_though_its_tokens_and_rows_are_exact_in_the_parent() -> None:
    moved = context((0, 0, 100), (200, 100, 100), (100, 200, 100), old_len=300, new_len=310)
    made = plan(DirectReuse(), moved, parent_exact_end=300, limit=309)
    assert (made.first_approximate, made.reused_tokens) == (100, 200)


def test_the_digest_tells_options_apart() -> None:
    whole = context((0, 0, 1000), new_len=1200)
    digests = {
        plan(policy, whole, parent_exact_end=1000, limit=1199).digest for policy in (EditLocal(k=1), EditLocal(k=2))
    }
    assert len(digests) == 2


def test_a_selection_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match="integer"):
        plan(Chosen(runs=((1.5, 9),)), EDITED, parent_exact_end=1000, limit=1009)  # type: ignore[arg-type]
