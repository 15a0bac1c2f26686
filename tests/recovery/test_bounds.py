"""Bounds that every policy takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.recovery import (
    Bounded,
    Bounds,
    EditLocal,
    PatchKV,
    PolicyContext,
    PrefixCache,
    RecoveryPolicy,
    check_policy,
    get_policy,
    plan,
    register,
)
from agentcache.recovery.registry import check_policy_reaches_engine
from agentcache.types import AlignedRun, PromptDiff, Run
from tests.recovery.contexts import UNTIMED, contexts, covered, edited, selected, suffix


@dataclass(frozen=True)
class Chosen(RecoveryPolicy):
    """Lossy: selects whatever a test says."""

    name: ClassVar[str] = "chosen"
    source: ClassVar[str] = "a test"
    runs: tuple[tuple[int, int], ...] = ()

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        return self.runs


bounds = st.builds(
    Bounds,
    max_tokens=st.none() | st.integers(0, 60),
    max_share=st.none() | st.sampled_from([0.0, 0.07, 0.5, 1.0]),
    max_generations=st.none() | st.integers(1, 4),
).filter(lambda made: made != Bounds())
runs = st.lists(st.tuples(st.integers(-5, 150), st.integers(-5, 150)), max_size=6).map(tuple)


@UNTIMED
@given(context=contexts(), limits=bounds, chosen=runs)
def test_the_first_runs_are_kept_within_the_budget_and_old_rows_join(
    context: PolicyContext, limits: Bounds, chosen: tuple[tuple[int, int], ...]
) -> None:
    assert context.generations is not None
    rows = suffix(context)
    in_order = [row for start, stop in chosen for row in range(start, stop) if row in rows]
    budget = len(rows)
    if limits.max_tokens is not None:
        budget = min(budget, limits.max_tokens)
    if limits.max_share is not None:
        budget = min(budget, round(limits.max_share * 100) * len(rows) // 100)
    expected = set(list(dict.fromkeys(in_order))[:budget])
    if limits.max_generations is not None:
        expected |= {row for row in rows if context.generations[row] >= limits.max_generations}
    assert selected(Bounded(Chosen(chosen), limits), context) == expected


@pytest.mark.parametrize("option", [{"max_tokens": 16}, {"max_share": 0.05}, {"max_generations": 1}])
def test_bounds_are_options_of_every_policy(option: dict[str, float]) -> None:
    made = get_policy("edit_local", {"k": 64, **option})
    assert made == Bounded(EditLocal(k=64), Bounds(**option))  # type: ignore[arg-type]
    assert (made.name, made.source, made.exact) == ("edit_local", EditLocal.source, False)
    check_policy(made)


def test_options_without_a_bound_give_the_bare_policy() -> None:
    given = {"k": 8, "max_tokens": None, "max_share": None, "max_generations": None}
    assert get_policy("edit_local", given) == EditLocal(k=8)


def test_an_exact_policy_keeps_every_bound_as_it_is() -> None:
    assert get_policy("prefix_cache", {"max_tokens": 5, "max_generations": 1}) == PrefixCache()


def test_a_bounded_patchkv_gives_up_the_least_attended_blocks_first() -> None:
    attention = np.zeros(1010, dtype=np.float32)
    attention[[500, 700, 900]] = [0.5, 0.9, 0.7]
    context = edited(attention=attention)
    made = get_policy("patchkv", {"window": 32, "kappa": 0.15, "max_tokens": 100})
    assert selected(made, context) == covered([Run(320, 352), Run(672, 704), Run(896, 928), Run(480, 484)])


def test_a_plan_goes_by_the_policys_own_name_and_tells_bounds_apart() -> None:
    made = [
        plan(get_policy("edit_local", {"k": 64, "max_tokens": most}), edited(), parent_exact_end=1000, limit=1009)
        for most in (10, 20, 700)
    ]
    assert [p.policy for p in made] == ["edit_local"] * 3
    assert [p.repair_tokens for p in made] == [10, 20, 64]
    bare = plan(EditLocal(k=64), edited(), parent_exact_end=1000, limit=1009)
    assert (bare.restore, bare.digest == made[-1].digest) == (made[-1].restore, False)


def test_rows_that_survived_too_many_edits_are_recomputed_whatever_the_budget() -> None:
    ages = np.zeros(1010, dtype=np.int32)
    ages[100:120], ages[500:540] = 3, 3
    made = get_policy("direct_reuse", {"max_generations": 3, "max_tokens": 0})
    planned = plan(made, edited(generations=ages), parent_exact_end=100, limit=1009)
    assert planned.recompute == (Run(300, 320), Run(500, 540)), "a row of P meets no edit"


def test_an_age_that_is_not_known_is_refused_where_it_matters() -> None:
    made = get_policy("direct_reuse", {"max_generations": 2})
    with pytest.raises(ConfigError, match="max_generations=2 bounds how many edits a row survives, which is not known"):
        made.select(edited())
    appended = PolicyContext(PromptDiff(300, 400, (AlignedRun(0, 0, 300),)), range(400))
    assert list(made.select(appended)) == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_tokens": -1}, "max_tokens=-1 is not allowed; take 0 or more"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 is not allowed: .*integer"),
        ({"max_share": 1.01}, "max_share=1.01 is not allowed; take a share from 0 to 1"),
        ({"max_share": "10%"}, "max_share='10%' is not allowed"),
        ({"max_generations": 0}, "max_generations=0 is not allowed; take 1 or more"),
    ],
)
def test_bounds_that_are_none_are_refused(option: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_policy("direct_reuse", option)


def test_an_unknown_option_is_refused_with_those_of_every_policy() -> None:
    with pytest.raises(ConfigError, match="options are: k, to; every policy takes: max_tokens, max_share, max_generat"):
        get_policy("edit_local", {"max_rows": 3})


def test_a_policy_whose_option_is_named_as_a_bound_is_refused() -> None:
    @dataclass(frozen=True)
    class Own(Chosen):
        """Lossy: has a budget of its own."""

        name: ClassVar[str] = "own"
        max_tokens: int = 3

    with pytest.raises(ConfigError, match="its option max_tokens has the name of a bound that every policy takes"):
        register(Own)


def test_a_bounded_policy_reaches_the_engine_when_its_policy_does() -> None:
    limits = Bounds(max_tokens=3)
    check_policy_reaches_engine(Bounded(PatchKV(window=1), limits), ())
    with pytest.raises(ConfigError, match=r"policy 'chosen' is defined in .*test_bounds"):
        check_policy_reaches_engine(Bounded(Chosen(), limits), ())
