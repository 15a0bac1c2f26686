"""The cells and items of the paired-edit benchmark, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentcache.errors import ConfigError
from agentcache.evaluation.paired_arms import (
    BUDGETS,
    OURS,
    PAPER,
    Arm,
    Situation,
    arms_of,
    delimiters,
    named_policies,
    options_of,
)
from agentcache.evaluation.paired_items import HARD, Cell, background, cells_of, draw, named_forms
from agentcache.evaluation.paired_transplant import Transplanted
from agentcache.profiling.datasets import load_dataset
from agentcache.profiling.derived import ChatFrame, DerivedItem
from agentcache.profiling.lookup import shipped_profiles
from agentcache.recovery import Bounded, OnlinePolicy, PolicyContext, Signal, check_policy, get_policy
from agentcache.recovery.base import Signals
from agentcache.recovery.rows import QUERY_ROWS
from agentcache.types import AlignedRun, PromptDiff, run_tokens
from tests.evaluation.words import Words

FRAME = ChatFrame("<user> ", " <assistant> ")


def drawn(cell: Cell, words: Words | None = None, **settings: Any) -> list[DerivedItem]:
    documents = background(load_dataset())
    return draw(cell, (words or Words()).encode, documents, FRAME, **({"count": 4, "seed": 5} | settings))


def situation(words: Words, item: DerivedItem) -> Situation:
    edited = run_tokens(item.edits)
    behind = item.new[item.edits[0].stop : item.query_start]
    return Situation(item, item.query_start - item.edits[0].start - edited, [*delimiters(words.decode, behind)])


def context(item: DerivedItem) -> PolicyContext:
    """What a policy sees of an item: everything but the edits is aligned, up to the question."""
    shift = item.query_start - item.old_query_start
    stops = [*(run.stop for run in item.edits)]
    starts = [*(run.start for run in item.edits[1:]), item.query_start]
    moved = shift if len(item.edits) == 1 else 0
    runs = [AlignedRun(0, 0, item.edits[0].start)]
    runs += [AlignedRun(a - moved, a, b - a) for a, b in zip(stops, starts, strict=True)]
    diff = PromptDiff(item.old_query_start, len(item.new), tuple(runs))
    attention = np.random.default_rng(0).random(len(item.new)).astype(np.float32)
    return PolicyContext(diff, item.new, attention=attention)


def test_cells_are_the_direct_condition_once_and_each_form_and_distance_of_the_derived_one() -> None:
    cells = cells_of(["direct", "derived"], ["table", "chain"], [0, 250], None)
    assert [str(cell) for cell in cells] == [
        "direct d=0",
        "derived d=0",
        "derived d=250",
        "derived chain d=0",
        "derived chain d=250",
    ]
    assert all(cell.tokens == 600 for cell in cells)
    (far,) = cells_of(["derived"], ["table"], [1500], None)
    assert far.tokens >= 2100
    assert cells_of(["direct"], ["table"], [0, 250], 1000) == [Cell("direct", "direct", 0, 1000)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["indirect"], ["table"], [0], None), "--conditions 'indirect' is not known; there are direct, derived"),
        ((["derived"], ["tabel"], [0], None), "--forms 'tabel' is not known"),
        ((["derived"], ["direct"], [0], None), "--conditions direct"),
        ((["derived"], ["table"], [1500], 1800), "--distances 1500 needs --tokens of 21"),
        ((["derived"], ["table"], [-1], None), "--distances -1"),
    ],
)
def test_words_that_are_not_allowed_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cells_of(*arguments)


def test_groups_of_forms_and_policies_are_written_out() -> None:
    assert named_forms(["table", "hard", "chain"]) == ("table", *HARD)
    assert named_policies(["paper", "attended:k=64", "edit_local"]) == (*PAPER, "attended:k=64")


def test_direct_and_derived_items_come_in_pairs() -> None:
    words = Words()
    direct, derived = (
        {item.draw: item for item in drawn(cells_of([condition], ["table"], [0], None)[0], words)}
        for condition in ("direct", "derived")
    )
    assert direct.keys() == derived.keys()
    for number, one in direct.items():
        two = derived[number]
        assert one.new_value == two.new_value
        assert abs(one.edit.start / one.query_start - two.edit.start / two.query_start) <= 0.03


@pytest.mark.parametrize("form", ["table", *HARD])
@pytest.mark.parametrize("k", [8, 32, 64])
def test_no_policy_recomputes_more_than_its_budget_of_aligned_tokens(form: str, k: int) -> None:
    words = Words()
    (cell,) = cells_of(["derived"], [form], [60], None)
    for item in drawn(cell, words, count=2):
        seen = context(item)
        suffix = {row for run in seen.diff.suffix for row in range(run.new_start, run.new_stop)}
        assert len(suffix) == situation(words, item).suffix
        for arm in arms_of([*BUDGETS], [k]):
            policy = get_policy(*options_of(arm, situation(words, item)))
            chosen = {row for a, b in policy.select(seen) for row in range(a, b)} & suffix
            most = policy.most(seen) if isinstance(policy, OnlinePolicy) else 0
            if isinstance(policy, Bounded):  # what it chooses in the worker is cut there
                most = min(most, policy.bounds.budget(len(suffix)) - len(chosen))
            if arm.policy in ("attended", "auto", "prophetkv", "causal_oracle"):  # the query comes on top
                chosen = {row for row in chosen if row < len(item.new) - QUERY_ROWS}
            assert arm.k is None or len(chosen) + most <= k, (arm, len(chosen), most)


def test_the_window_to_the_boundary_is_that_of_the_items_document() -> None:
    words = Words()
    (cell,) = cells_of(["derived"], ["table"], [0], None)
    item = drawn(cell, words)[0]
    name, options = options_of(Arm("edit_local_boundary"), situation(words, item))
    (run,) = get_policy(name, options).select(context(item))
    assert run == (item.edit.stop, item.carrier.stop)


def test_delimiters_are_tokens_without_letters_and_digits() -> None:
    words = Words()
    ids = words.encode("Lookup table:\n- Alpha 7: salt.\n")
    assert "".join(sorted(words.decode([token]) for token in delimiters(words.decode, ids))) == "\n -.:"


def test_a_budget_among_the_options_stands_for_those_of_the_run() -> None:
    arms = arms_of(["attended:k=64:block=16", "random", "direct_reuse"], [8, 32], ["edit_local"])
    assert [arm.label for arm in arms] == [
        "prefix_cache",
        "attended:block=16@64",
        "random@8",
        "random@32",
        "direct_reuse",
        "transplanted/edit_local@8",
        "transplanted/edit_local@32",
    ]
    words = Words()
    item = drawn(cells_of(["derived"], ["table"], [0], None)[0], words)[0]
    assert options_of(arms[1], situation(words, item))[1]["block"] == 16


@pytest.mark.parametrize(
    ("policies", "budgets", "message"),
    [
        (["edit_lokal"], [32], "unknown policy 'edit_lokal'"),
        (["direct_reuse:x=1"], [32], "no option 'x'"),
        (["attended:x=1"], [32], "no option 'x'"),
        (["attended"], [0], "a budget is 1 token or more"),
    ],
)
def test_an_arm_that_cannot_run_is_refused_before_anything_is_measured(
    policies: list[str], budgets: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        arms_of(policies, budgets)


def test_every_named_policy_is_one_that_runs() -> None:
    assert {arm.policy for arm in arms_of([*PAPER, *OURS], [32])} == {"prefix_cache", *PAPER, *OURS}


def test_a_transplant_takes_the_rows_of_the_other_policy() -> None:
    words = Words()
    item = drawn(cells_of(["derived"], ["table"], [0], None)[0], words)[0]
    seen, at = context(item), situation(words, item)
    done = np.zeros(len(item.new), dtype=np.bool_)
    scores = np.random.default_rng(1).random(len(item.new)).astype(np.float32)
    for policy in ("edit_local", "random", "attended", "prophetkv", "causal_oracle"):
        name, options = options_of(Arm(policy, 32), at)
        inner = get_policy(name, options)
        name, options = options_of(Arm(policy, 32, transplant=True), at)
        assert name == "transplanted"
        transplanted = get_policy(name, options)
        assert isinstance(transplanted, Transplanted) and transplanted.transplants
        assert Signal.EFFECT in transplanted.signals
        signals = Signals(done=done, query=scores, effect=scores)
        if isinstance(inner, OnlinePolicy):
            assert [*transplanted.choose(seen, signals)] == [*inner.choose(seen, signals)]
            assert [*transplanted.select(seen)] == [*inner.select(seen)]
            assert transplanted.check_layer == inner.check_layer
        else:
            assert [*transplanted.choose(seen, signals)] == [*inner.select(seen)]
            assert [*transplanted.select(seen)] == []
        assert transplanted.most(seen) <= 32


def test_a_transplant_that_cannot_run_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="does not choose rows once"):
        arms_of(["edit_local"], [32], ["frontier"])


@pytest.mark.parametrize("of", ["prefix_cache", "frontier", "mean_shift", "transplanted"])
def test_what_is_not_chosen_once_cannot_be_transplanted(of: str) -> None:
    with pytest.raises(ConfigError, match="does not choose rows once"):
        Transplanted(of=of)


@pytest.mark.parametrize(
    "of", ["edit_local:k=16", "random:k=16", "attended:k=16:window=0", "cacheblend", "causal_oracle"]
)
def test_the_transplant_keeps_the_contract_of_policies(of: str) -> None:
    check_policy(Transplanted(of=of))


@pytest.mark.parametrize("policy", BUDGETS)
def test_a_budget_leaves_no_setting_to_a_profile(policy: str) -> None:
    words = Words()
    item = drawn(Cell("direct", "direct", 0, 200), words)[0]
    name, options = options_of(Arm(policy, 16), situation(words, item))
    assert next(shipped_profiles()).options_for(name, options) == options
