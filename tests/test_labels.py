"""Labels of rows as text: what is written is read again, and a plan's labels sum to its counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.labels import Label, count_labels, format_labels, label_plan, overlay, parse_labels
from agentcache.recovery import get_policy
from agentcache.recovery.base import PolicyContext
from agentcache.recovery.planner import plan
from agentcache.types import AlignedRun, PromptDiff, complement, run_tokens

PARTS = st.lists(st.tuples(st.sampled_from(["P", "X", "R", "F", "N", "-"]), st.integers(0, 40)), max_size=20)


def laid(parts: list[tuple[str, int]]) -> tuple[list[tuple[str, int, int]], int]:
    """Returns parts side by side as labels, and their length."""
    labels, at = [], 0
    for name, rows in parts:
        labels.append((name, at, at + rows))
        at += rows
    return labels, at


def by_row(text: str) -> str:
    return "".join(name * (stop - start) for name, start, stop in parse_labels(text))


def test_labels_are_run_length_text() -> None:
    labels = [("P", 0, 42), ("X", 42, 49), ("F", 49, 81), ("F", 81, 90)]
    assert format_labels(labels, 91) == "P*42 X*7 F*41 -*1"


def test_a_name_may_have_digits() -> None:
    assert [*parse_labels("k8v4*32 -*1")] == [Label("k8v4", 0, 32), Label("-", 32, 33)]


def test_no_rows_are_no_text() -> None:
    assert format_labels([], 0) == "" and [*parse_labels("")] == []


@pytest.mark.parametrize("text", ["P", "P*", "*3", "P*-3", "P*3,X*2"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no label of rows"):
        [*parse_labels(text)]


@given(PARTS)
def test_a_text_is_read_as_it_was_written(parts: list[tuple[str, int]]) -> None:
    labels, length = laid(parts)
    assert by_row(format_labels(reversed(labels), length)) == "".join(name * rows for name, rows in parts)


@given(PARTS, st.lists(st.tuples(st.integers(0, 300), st.integers(1, 30)), max_size=5))
def test_an_overlay_changes_its_rows_and_no_other(parts: list[tuple[str, int]], wanted: list[tuple[int, int]]) -> None:
    before = format_labels(*laid(parts))
    runs = sorted((start, start + rows) for start, rows in wanted)
    disjoint = [run for at, run in enumerate(runs) if at == 0 or run[0] >= max(stop for _, stop in runs[:at])]
    changed = {row for run in disjoint for row in range(*run)}
    expected = "".join("R" if row in changed else name for row, name in enumerate(by_row(before)))
    assert by_row(overlay(before, "R", disjoint)) == expected


@pytest.mark.parametrize("policy", ["prefix_cache", "direct_reuse", "edit_local", "epic"])
@pytest.mark.parametrize("missing", [(), ((5, 9), (70, 75))])
def test_a_plans_labels_sum_to_its_counts(policy: str, missing: tuple[tuple[int, int], ...]) -> None:
    diff = PromptDiff(220, 260, (AlignedRun(0, 0, 40), AlignedRun(50, 60, 60), AlignedRun(120, 140, 90)))
    context = PolicyContext(diff, [7] * 260)
    made = plan(get_policy(policy, {}), context, parent_exact_end=220, missing=missing, limit=259)
    text = label_plan(made, diff)
    counts = {
        "P": made.prefix_tokens,
        "X": made.fresh_tokens,
        "R": made.repair_tokens,
        "F": made.reused_tokens,
        "N": 260 - made.load_end,
    }
    assert count_labels(text) == {name: rows for name, rows in counts.items() if rows}
    fresh = run_tokens(complement(((r.new_start, r.new_stop) for r in diff.aligned), made.load_end))
    assert count_labels(text).get("X", 0) == fresh
