"""Policy `auto` on a running engine. Costs are made up, so that no clock decides a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentcache.engine.costs import CostModel, Sample, work_of
from agentcache.engine.step_clock import StepClock
from agentcache.engine.wire import ResumeParams
from tests.engine.harness import NEW, OLD, Engine, Reference, assert_exact, edit, first_version, text

SHORT = edit(OLD, 230, 8, text(12, seed=3))
"""62 tokens follow the edit."""


@pytest.fixture(autouse=True)
def timed(engine: Engine) -> None:
    """Lets the engine tell what it has timed at start-up, in its first step, so that no test hears it later."""
    engine.ask([5, 6, 7], n=1)


def believe(engine: Engine, costs: CostModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.half, "costs", costs)
    monkeypatch.setattr(engine.half._resumes, "_costs", costs)


@pytest.fixture
def set_costs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Returns what makes the engine believe in a machine whose forward takes `a + b·tokens` seconds."""

    def give(a: float, b: float) -> None:
        costs = CostModel(engine.half.costs.limits)
        costs.fit([Sample("forward", *work_of([(0, n)]), a + b * n) for n in (1, 64, 256)])
        believe(engine, costs, monkeypatch)
        monkeypatch.setattr(engine.half, "clock", StepClock(CostModel(costs.limits)))  # teaches another model

    return give


def resume(engine: Engine, ids: list[int], **more: object):
    """Returns the answer to a resume of `v1` by `auto`."""
    first_version(engine)
    answer = engine.ask(ids, ResumeParams(version="v2", parent="v1", policy="auto", options=more))
    assert answer.recovery is not None
    assert answer.recovery.requested_policy == "auto"
    return answer


def test_a_short_suffix_is_computed_exactly(engine: Engine, reference: Reference, set_costs):
    set_costs(0.01, 1e-6)
    answer = resume(engine, SHORT)
    recovery = answer.recovery
    assert (recovery.policy, recovery.exact) == ("prefix_cache", True)
    assert recovery.reason.startswith("prefix caching was chosen: it is estimated to take ")
    assert recovery.estimate["exact_ms"] < recovery.estimate["edit_local_ms"]
    assert_exact(reference, answer)


def test_a_long_suffix_is_recovered(engine: Engine, set_costs):
    set_costs(1e-6, 1e-3)
    recovery = resume(engine, NEW).recovery
    assert (recovery.policy, recovery.exact, recovery.reason) == ("edit_local", False, None)
    assert recovery.reused_tokens == 157
    # 20 rows are new, 32 are repaired, and one is vLLM's; this machine restores for nothing.
    assert recovery.estimate == pytest.approx({"exact_ms": 210, "edit_local_ms": 53}, rel=0.01)


def test_the_same_machine_decides_by_the_margin(engine: Engine, set_costs):
    set_costs(1e-6, 1e-3)
    recovery = resume(engine, NEW, margin=0.8).recovery
    assert (recovery.policy, recovery.exact) == ("prefix_cache", True)
    assert "auto was asked for" not in recovery.reason


def test_an_online_candidate_chooses_in_the_worker(engine: Engine, set_costs):
    set_costs(1e-6, 1e-3)
    recovery = resume(engine, NEW, candidate="attended:k=16").recovery
    assert (recovery.policy, recovery.exact) == ("attended", False)
    assert set(recovery.estimate) == {"exact_ms", "attended_ms"}
    assert recovery.repair_tokens > 16


def test_an_append_is_no_choice(engine: Engine, reference: Reference, set_costs):
    set_costs(1e-6, 1e-3)
    answer = resume(engine, [*OLD, *text(20, seed=4)])
    assert (answer.recovery.policy, answer.recovery.reason, answer.recovery.estimate) == ("prefix_cache", None, None)
    assert_exact(reference, answer)


def test_an_engine_that_was_not_timed_is_exact(engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch):
    believe(engine, CostModel(engine.half.costs.limits), monkeypatch)
    answer = resume(engine, NEW)
    assert (answer.recovery.policy, answer.recovery.estimate) == ("prefix_cache", None)
    assert answer.recovery.reason == "auto is exact until the engine has timed a few forwards"
    assert_exact(reference, answer)


def test_steps_and_loads_reach_the_cost_model(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    told: list[tuple[list[tuple[int, int]], str | None]] = []

    class Listener(StepClock):
        def begin(self, runs, load=None):
            told.append((list(runs), None if load is None else load[0]))
            super().begin(runs, load)

    monkeypatch.setattr(engine.half, "clock", Listener(engine.half.costs))
    first_version(engine)
    assert told[0] == ([(0, 300)], None)
    assert [runs for runs, _ in told[1:8]] == [[(at, at + 1)] for at in range(300, 307)]
    told.clear()
    engine.ask(NEW, ResumeParams(version="v2", parent="v1", policy="edit_local"))
    assert told[0] == ([(309, 310)], "edit_local")
