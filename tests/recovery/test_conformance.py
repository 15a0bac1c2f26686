from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from agentcache.errors import ConfigError
from agentcache.recovery import EditLocal, PolicyContext, RecoveryPolicy, check_policy, get_policy, plan, policy_names
from agentcache.recovery.conformance import check_plan, scenarios
from agentcache.types import AlignedRun, Run

OPTIONS: dict[str, tuple[dict[str, object], ...]] = {
    "attention_blocks": ({}, {"k": 100, "block": 16, "window": 0, "query": 0}),
    "attended": ({}, {"k": 20, "block": 16, "window": 0}, {"by": "deviation"}, {"by": "product", "check": 1}),
    "cacheblend": ({}, {"share": 0.5, "check": 2, "rank": "values"}),
    "causal_oracle": ({}, {"k": 20, "block": 4, "operator": "transplant"}),
    "carrier_window": ({}, {"start": 150, "stop": 180, "window": 8}),
    "frontier": (
        {},
        {"first": 8, "threshold": 0.9, "block": 8, "calm": 1, "most_tokens": 60},
        {"length_model": "0.5,0.1,0.2,0.3,0,0,0.01"},
    ),
    "mean_shift": ({}, {"share": 0.3}, {"weight": "absolute"}, {"selector": "edit_local"}, {"selector": "attended"}),
    "prophetkv": ({}, {"k": 30}, {"share": 0.0}),
    "edit_local": ({}, {"k": 0}, {"k": 7}, {"k": 10_000}, {"to": "boundary"}),
    "edit_to_carrier": ({}, {"k": 60, "blocks": 9, "block": 16}),
    "patchkv": (
        {"window": 40},
        {"length_model": "0.5,0.1,0.2,0.3,0,0,0.01", "kappa": 0.2, "count": "tokens", "block": 16, "query": 0},
        {"window": 0, "kappa": 0},
    ),
    "random": ({}, {"k": 50, "block": 1, "seed": 4}),
    "structural": ({}, {"k": 5, "edge": 3, "ids": "1100, 1200"}),
}
ROWS = [(name, options) for name in policy_names() for options in OPTIONS.get(name, ({},))]


@pytest.mark.parametrize(("name", "options"), ROWS, ids=lambda value: str(value))
def test_every_registered_policy_conforms(name: str, options: dict[str, object]) -> None:
    check_policy(get_policy(name, options))


@dataclass(frozen=True)
class Honest(RecoveryPolicy):
    """Lossy: the correct policy that each faulty one below spoils in one way."""

    name: ClassVar[str] = "honest"
    source: ClassVar[str] = "a test"

    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        return [(run.new_start, run.new_stop - 1) for run in context.diff.suffix]


def test_a_correct_policy_of_somebody_else_conforms() -> None:
    check_policy(Honest())


def spoiled(doc: str = "Lossy: faulty.", frozen: bool = True, **members: object) -> RecoveryPolicy:
    body = {"__doc__": doc, **members}
    kind = type("Faulty", (Honest if frozen else RecoveryPolicy,), body)
    return (dataclass(frozen=True)(kind) if frozen else kind)()


def test_a_policy_that_hides_its_loss_is_caught() -> None:
    with pytest.raises(AssertionError, match="first line must say 'lossy'"):
        check_policy(spoiled(doc="Fast and free."))


def test_a_policy_without_a_source_is_caught() -> None:
    with pytest.raises(AssertionError, match="Faulty: source=''"):
        check_policy(spoiled(source=""))


def test_a_policy_that_can_change_is_caught() -> None:
    members = {"name": "loose", "source": "a test", "select": Honest.select}
    with pytest.raises(AssertionError, match="not a frozen dataclass"):
        check_policy(spoiled(frozen=False, **members))


def test_a_policy_that_answers_differently_each_time_is_caught() -> None:
    calls = itertools.count(1)
    with pytest.raises(AssertionError, match="two calls of select differ"):
        check_policy(spoiled(select=lambda *_: [(0, 500 * (next(calls) % 2))]))


def test_an_exact_policy_that_selects_is_caught() -> None:
    with pytest.raises(AssertionError, match="an exact policy selects nothing"):
        check_policy(spoiled(exact=True))


def test_a_run_that_ends_before_it_starts_is_caught() -> None:
    with pytest.raises(AssertionError, match="a run ends before it starts"):
        check_policy(spoiled(select=lambda *_: [(9, 3)]))


def test_a_policy_that_changes_its_context_is_caught() -> None:
    def select(self: RecoveryPolicy, context: PolicyContext) -> list[tuple[int, int]]:
        object.__setattr__(context, "boundaries", ())
        return []

    with pytest.raises(AssertionError, match="changes the policy or its context"):
        check_policy(spoiled(select=select))


def test_a_policy_that_writes_into_the_attention_is_caught() -> None:
    def select(self: RecoveryPolicy, context: PolicyContext) -> list[tuple[int, int]]:
        if context.attention is not None:
            context.attention[:] += 1
        return []

    with pytest.raises(AssertionError, match="changes the policy or its context"):
        check_policy(spoiled(select=select))


def refusing(when: Callable[[PolicyContext], bool]) -> RecoveryPolicy:
    def select(self: RecoveryPolicy, context: PolicyContext) -> list[tuple[int, int]]:
        if when(context):
            raise ConfigError("no")
        return []

    return spoiled(select=select)


def test_a_policy_may_refuse_an_edit_whose_parent_was_not_measured() -> None:
    check_policy(refusing(lambda context: context.attention is None and bool(context.diff.suffix)))


def test_a_policy_that_refuses_what_it_could_do_is_caught() -> None:
    with pytest.raises(AssertionError, match="refuses a context that lacks nothing: no"):
        check_policy(refusing(lambda context: context.diff.new_len > 300))
    with pytest.raises(AssertionError, match="refuses where nothing follows an edit: no"):
        check_policy(refusing(lambda context: context.attention is None))


def test_a_policy_that_chooses_otherwise_when_it_is_bounded_is_caught() -> None:
    calls = itertools.count()

    def select(self: RecoveryPolicy, context: PolicyContext) -> list[tuple[int, int]]:
        return [(0, 500) if next(calls) % 6 < 3 else (130, 131)]

    with pytest.raises(AssertionError, match=r"with Bounds\(max_tokens=9.* it selects 1 rows of"):
        check_policy(spoiled(select=select))


def test_a_policy_whose_options_are_no_plain_values_is_caught() -> None:
    @dataclass(frozen=True)
    class Heavy(Honest):
        """Lossy: carries an array."""

        weights: list[float] = field(default_factory=list)

    with pytest.raises(AssertionError, match=r"Heavy\.weights=\[\] is no plain JSON value"):
        check_policy(Heavy())


def tampered(**changes: object) -> None:
    """Checks a correct plan with some fields changed."""
    scenario = next(s for s in scenarios() if s.title == "replacement, longer, new turn")
    state = {"parent_exact_end": 400, "missing": (), "limit": 454}
    made = plan(EditLocal(k=8), scenario.context, **state)
    check_plan(made, scenario.context, scenario.old_ids, **state)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    check_plan(made, scenario.context, scenario.old_ids, **state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_end": 455}, "load_end 455 is not in"),
        ({"recompute": (Run(120, 167),)}, "do not tile"),
        ({"recompute": (Run(120, 140), Run(140, 168))}, "not ascending and merged"),
        ({"restore": (AlignedRun(0, 0, 120), AlignedRun(137, 168, 262))}, "restores other tokens"),
        ({"repair_tokens": 9}, "do not sum"),
        ({"first_approximate": 169}, "first approximate row is 168, not 169"),
        ({"exact": True}, "exact=True with first approximate row 168"),
    ],
    ids=lambda value: str(value),
)
def test_a_wrong_plan_is_caught(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        tampered(**changes)


def test_a_plan_that_restores_lost_rows_is_caught() -> None:
    scenario = next(s for s in scenarios() if s.title == "append")
    made = plan(EditLocal(), scenario.context, parent_exact_end=400, limit=429)
    with pytest.raises(AssertionError, match="restores lost rows"):
        check_plan(made, scenario.context, scenario.old_ids, parent_exact_end=400, missing=[(5, 6)], limit=429)
