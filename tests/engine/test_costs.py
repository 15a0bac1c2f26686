"""The cost model on machines that are made up, where every coefficient is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.engine.costs import CostModel, Drift, Limits, Sample, Work, non_negative_fit, work_of
from agentcache.recovery import DirectReuse, EditLocal, PolicyContext, PrefixCache, RecoveryPlan, plan
from agentcache.types import AlignedRun, PromptDiff, Run

LIMITS = Limits(step_tokens=1024, slice_tokens=1024, runs=16)
POINTS = [(4, 0), (64, 0), (64, 2048), (256, 0), (8, 4096), (256, 2048), (640, 0)]
OBJECTS = [(16, 1), (256, 16), (256, 1), (2048, 8)]
MACHINE = (0.011, 3e-4, 2e-7)
RESTORE = (1e-4, 1e-6, 2e-5)

coefficient = st.floats(1e-9, 1e-1)
seconds = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 5000)


def samples(forward=MACHINE, restore=RESTORE) -> list[Sample]:
    """Returns the timings of a machine that has exactly these coefficients."""
    a, b, d = forward
    e, f, g = restore
    made = [Sample("restore", rows, objects, e + f * rows + g * objects) for rows, objects in OBJECTS]
    for rows, context in POINTS:
        work = work_of([(context, context + rows)])
        made.append(Sample("forward", *work, a + b * work.tokens + d * work.pairs))
    return made


def model(forward=MACHINE, restore=RESTORE, limits=LIMITS) -> CostModel:
    costs = CostModel(limits)
    costs.fit(samples(forward, restore))
    return costs


def edit(suffix: int, *, prefix: int = 2000, fresh: int = 40, turn: int = 20) -> PolicyContext:
    """Returns a prompt of prefix, new tokens, an aligned suffix and a new turn."""
    runs = [AlignedRun(0, 0, prefix)] if prefix else []
    runs += [AlignedRun(prefix + 30, prefix + fresh, suffix)] if suffix else []
    new_len = prefix + fresh + suffix + turn
    diff = PromptDiff(prefix + 30 + suffix, new_len, tuple(runs))
    return PolicyContext(diff, np.zeros(new_len, dtype=np.int32))


def planned(context: PolicyContext, policy=None) -> RecoveryPlan:
    return plan(
        policy or EditLocal(),
        context,
        parent_exact_end=context.diff.old_len,
        limit=len(context.token_ids) - 1,
    )


def test_the_work_of_runs_counts_each_pair_of_query_and_row():
    runs = [(0, 5), (7, 9), (9, 9)]
    assert work_of(runs) == Work(7, sum(at + 1 for start, stop in runs for at in range(start, stop)))


# -- the fit -----------------------------------------------------------------------------------------------------------


@given(forward=st.tuples(coefficient, coefficient, coefficient))
def test_a_machine_that_follows_the_model_is_found(forward):
    costs = model(forward)
    for sample in samples(forward):
        if sample.kind == "forward":
            assert costs.forward_s(Work(sample.rows, sample.other)) == pytest.approx(sample.seconds, rel=1e-6)


def test_known_coefficients_are_recovered():
    costs = model()
    assert costs.forward == pytest.approx(MACHINE, rel=1e-6)
    assert costs.restore == pytest.approx(RESTORE, rel=1e-6)


@given(
    features=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_fit_is_non_negative_and_no_grid_point_is_better(features, data):
    table = np.array([(1.0, *row) for row in features])
    taken = np.array([data.draw(st.floats(0.1, 9)) for _ in features])
    found = non_negative_fit(table, taken)
    error = np.square(table @ found / taken - 1).sum()
    assert (found >= 0).all()
    for point in np.ndindex(4, 4, 4):
        other = np.array(point) * 0.7
        assert error <= np.square(table @ other / taken - 1).sum() + 1e-6


@given(times=st.lists(seconds, min_size=7, max_size=7))
def test_a_fit_to_odd_timings_is_finite_and_not_negative(times):
    costs = CostModel(LIMITS)
    costs.fit([Sample("forward", *work_of([(c, c + n)]), t) for (n, c), t in zip(POINTS, times, strict=True)])
    assert costs.ready == any(1e-9 < t < 1e9 for t in times)
    if costs.ready:
        assert all(0 <= c < math.inf for c in costs.forward)


def test_no_timings_leave_the_model_as_it_is():
    costs = CostModel(LIMITS)
    costs.fit([])
    assert not costs.ready
    fitted = model()
    before = replace(fitted)
    fitted.fit([Sample("forward", 4, 10, math.nan)])
    assert fitted == before


# -- estimates ---------------------------------------------------------------------------------------------------------


def test_an_exact_resume_is_the_steps_over_what_vllm_does_not_have():
    a, b, d = MACHINE
    work = work_of([(512, 2600)])
    assert model().estimate_exact(2600, 512) == pytest.approx(3 * a + b * work.tokens + d * work.pairs)
    assert model().estimate_exact(2600, 9999) == pytest.approx(model().steps_s(2599, 2600)), "one token is computed"


def test_a_recovery_is_its_restore_its_segments_and_the_rest():
    costs, context = model(), edit(1000)
    found = costs.estimate_recovery(planned(context), new_len=3060, local=1984)
    copied = costs.restore_s(16 + 968, 1 + 4)
    assert found == pytest.approx(copied + costs.segments_s([(2000, 2072)]) + costs.steps_s(3040, 3060))


def test_rows_that_vllm_has_cost_nothing():
    costs, made = model(), planned(edit(1000))
    estimates = [costs.estimate_recovery(made, new_len=3060, local=local) for local in (0, 1000, 2000)]
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[0] > estimates[-1]
    assert costs.estimate_recovery(made, new_len=3060, local=3000) == pytest.approx(
        costs.estimate_recovery(made, new_len=3060, local=2072)
    ), "vLLM's own cache is exact: it does not reach the first approximate row"


def test_an_exact_plan_with_nothing_to_load_is_the_exact_estimate():
    made = planned(edit(1000), PrefixCache())
    assert model().estimate_recovery(made, new_len=3060, local=2000) == model().estimate_exact(3060, 2000)


def test_what_is_chosen_in_the_worker_and_what_must_be_fetched_cost_more():
    costs, made = model(), planned(edit(1000), DirectReuse())
    plain = costs.estimate_recovery(made, new_len=3060, local=2000)
    assert costs.estimate_recovery(made, new_len=3060, local=2000, online=64) > plain
    assert costs.estimate_recovery(made, new_len=3060, local=2000, fetch_rows=3000) > plain


def test_a_repair_beyond_the_limit_pays_for_steps_of_its_own():
    costs = model()
    for _ in range(9):
        costs.observe_step([(0, 4)], 1.0)
    made = planned(edit(1000, fresh=3000))
    (run,) = made.recompute
    parts = costs.restore_s(968, 4) + costs.segments_s([run]) + costs.steps_s(6000, 6020)
    assert costs.estimate_recovery(made, new_len=6020, local=2000) == pytest.approx(parts + 3 * costs.overhead)


@given(
    forward=st.tuples(coefficient, coefficient, coefficient),
    restore=st.tuples(coefficient, coefficient, coefficient),
    shape=st.tuples(counts, counts, counts, counts),
    local=counts,
    more=st.integers(1, 300),
)
def test_estimates_are_finite_positive_and_grow_with_the_work(forward, restore, shape, local, more):
    prefix, fresh, suffix, turn = shape
    costs = model(forward, restore)
    smaller, larger = (edit(suffix, prefix=prefix, fresh=fresh, turn=turn + 1 + extra) for extra in (0, more))
    found = []
    for context in (smaller, larger):
        new_len = len(context.token_ids)
        exact = costs.estimate_exact(new_len, local)
        recovery = costs.estimate_recovery(planned(context), new_len=new_len, local=local)
        assert 0 < exact < math.inf
        assert 0 < recovery < math.inf
        found.append((exact, recovery))
    assert found[0][0] <= found[1][0] * (1 + 1e-9)
    assert found[0][1] <= found[1][1] * (1 + 1e-9)
    assert costs.segments_s([(5, 5 + more)]) <= costs.segments_s([(5, 6 + more)])
    assert costs.restore_s(more, 1) <= costs.restore_s(more + 1, 2)
    assert costs.fetch_s(more) <= costs.fetch_s(more + 1)


# -- what really happened ----------------------------------------------------------------------------------------------


def test_steps_that_take_longer_than_fitted_are_followed():
    costs = model()
    before = costs.estimate_exact(2000, 0)
    for _ in range(40):
        costs.observe_step([(0, 500)], 3 * costs.forward_s(work_of([(0, 500)])))
    assert costs.steps.ratio == pytest.approx(3, rel=0.01)
    assert costs.estimate_exact(2000, 0) == pytest.approx(3 * before, rel=0.01)


def test_small_steps_tell_the_overhead_and_not_the_speed():
    costs = model()
    for start in range(50):
        costs.observe_step([(start, start + 1)], 0.02 + costs.forward_s(work_of([(start, start + 1)])))
    assert costs.overhead == pytest.approx(0.02)
    assert costs.steps.ratio == 1
    costs.observe_step([(3, 4)], 60.0)
    assert costs.overhead == pytest.approx(0.02), "one that was held up tells nothing"


def test_a_load_is_followed_by_policy():
    costs, made = model(), planned(edit(1000))
    fitted = costs.load_s([(2000, 2072)], 984, 5)
    own = costs.steps_s(3040, 3060)
    for policy in ("edit_local", "epic"):
        assert costs.estimate_recovery(replace(made, policy=policy), new_len=3060, local=1984) == pytest.approx(
            fitted + own
        )
    for _ in range(40):
        costs.observe_step([(3040, 3060)], 2 * fitted + own, ("edit_local", fitted))
    assert costs.estimate_recovery(made, new_len=3060, local=1984) == pytest.approx(2 * fitted + own, rel=0.01)
    assert costs.estimate_recovery(replace(made, policy="epic"), new_len=3060, local=1984) == pytest.approx(
        fitted + own
    )
    assert costs.steps.ratio == 1


def test_a_step_with_a_small_load_tells_of_the_step():
    costs = model()
    forward = costs.forward_s(work_of([(0, 1000)]))
    for _ in range(40):
        costs.observe_step([(0, 1000)], 2 * forward + 0.1 * forward, ("edit_local", 0.1 * forward))
    assert not costs.loads
    assert costs.steps.ratio == pytest.approx(2, rel=0.01)


def test_a_slow_tier_is_known_after_a_few_fetches():
    costs = model()
    for _ in range(6):
        costs.observe_fetch(3000, 20.0)
    assert costs.fetch_s(3000) == pytest.approx(20, rel=0.2)


def test_one_odd_report_moves_little():
    drift = Drift()
    for _ in range(30):
        drift.observe(1.0, 1.0)
    drift.observe(1.0, 1e9)
    assert drift.ratio < 1.16


@given(reports=st.lists(st.tuples(st.integers(0, 2000), seconds, st.none() | seconds), max_size=30))
def test_estimates_stay_finite_whatever_is_reported(reports):
    costs = model()
    for rows, taken, load in reports:
        costs.observe_step([(10, 10 + rows)], taken, None if load is None else ("edit_local", load))
        costs.observe_fetch(rows, taken)
    made = planned(edit(1000))
    assert 0 < costs.estimate_exact(3060, 100) < math.inf
    assert 0 < costs.estimate_recovery(made, new_len=3060, local=0, fetch_rows=10) < math.inf


def test_reports_before_the_fit_tell_nothing():
    costs = CostModel(LIMITS)
    costs.observe_step([(0, 100)], 1.0)
    assert costs == CostModel(LIMITS)


def test_runs_that_do_not_fit_in_one_batch_pay_for_each():
    a, b, d = MACHINE
    runs = [Run(i * 10, i * 10 + 1) for i in range(40)]
    work = work_of(runs)
    assert model().segments_s(runs) == pytest.approx(3 * a + b * work.tokens + d * work.pairs)
    assert model().segments_s([]) == 0
