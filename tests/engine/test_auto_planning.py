"""What policy `auto` plans, without an engine."""

from __future__ import annotations

import numpy as np
import pytest

from agentcache.engine.planning import Planned, plan_request
from agentcache.engine.wire import ResumeParams
from agentcache.recovery import Attended, RecoveryPlan
from agentcache.store.compose import compose
from agentcache.store.extents import Extent
from agentcache.store.version import Version

OLD = list(range(100, 400))
NEW = [*OLD[:100], *range(1000, 1020), *OLD[110:]]


def parent(exact_end: int = 300) -> Version:
    extents = (Extent(1, 0, 300, 0),)
    ids = np.asarray(OLD, dtype=np.int32)
    return Version("v1", "default", "v1", None, ids, exact_end, (), extents, state="committed")


def plan(estimate, *, ids=NEW, version: Version | None = None, **options) -> Planned:
    params = ResumeParams(version="v2", parent="v1", policy="auto", options=options)
    version = version or parent()
    return plan_request(ids, compose(version), params, version.exact_end, estimate)


def costing(lossy: float, exact: float, alone: float = 10.0, most: list[int] | None = None):
    """Returns an estimator of fixed seconds; what policies may choose in the worker is added to `most`."""

    def estimate(plan: RecoveryPlan | None, online: int) -> float:
        if plan is None:
            return alone
        if not plan.exact and most is not None:
            most.append(online)
        return exact if plan.exact else lossy

    return estimate


def test_what_saves_enough_is_taken():
    made = plan(costing(0.5, 1.0))
    assert made.plan is not None
    assert (made.plan.policy, made.plan.exact, made.reason) == ("edit_local", False, None)
    assert made.estimate == {"exact_ms": 1000, "edit_local_ms": 500}


@pytest.mark.parametrize("lossy", [0.95, 1.0, 7.0])
def test_what_saves_too_little_is_not(lossy):
    made = plan(costing(lossy, 1.0))
    assert made.plan is not None
    assert (made.plan.policy, made.plan.exact, made.plan.restore) == ("prefix_cache", True, ((0, 0, 100),))
    assert made.reason is not None
    assert made.reason.startswith("prefix caching was chosen: it is estimated to take 1000 ms, edit_local")
    assert made.estimate == {"exact_ms": 1000, "edit_local_ms": lossy * 1000}


def test_the_margin_is_the_callers():
    assert plan(costing(0.95, 1.0), margin=0.0).plan.policy == "edit_local"
    assert plan(costing(0.5, 1.0), margin=0.6).plan.policy == "prefix_cache"


def test_an_engine_that_was_not_timed_is_exact():
    made = plan(None)
    assert made.plan is not None
    assert (made.plan.policy, made.estimate) == ("prefix_cache", None)
    assert made.reason == "auto is exact until the engine has timed a few forwards"


@pytest.mark.parametrize("ids", [[*OLD, 7, 8], OLD[:200], [*OLD[:100], 5, 6]], ids=["append", "truncation", "new end"])
def test_where_both_are_exact_there_is_nothing_to_choose(ids):
    made = plan(costing(9.0, 1.0), ids=ids)
    assert made.plan is not None
    assert (made.plan.policy, made.plan.exact, made.reason, made.estimate) == ("prefix_cache", True, None, None)


def test_vllm_alone_does_what_would_have_to_be_fetched_for_too_long():
    made = plan(costing(30.0, 20.0, alone=1.0))
    assert made.plan is None
    assert made.reason == "prefix caching was chosen: it is estimated to take 1000 ms, edit_local 30000 ms"
    assert made.estimate == {"exact_ms": 1000, "edit_local_ms": 30000}
    assert plan(costing(0.5, 20.0, alone=1.0)).plan.policy == "edit_local"


def test_the_rows_that_a_policy_may_choose_in_the_worker_are_reckoned_with():
    most: list[int] = []
    made = plan(costing(0.5, 1.0, most=most), candidate="attended:k=48")
    assert most == [48]
    assert made.policy == Attended(k=48)
    assert plan(costing(2.0, 1.0), candidate="attended:k=48").policy is None


def test_nothing_in_common_is_no_choice():
    made = plan(costing(0.5, 1.0), ids=list(range(5000, 5300)))
    assert (made.plan, made.reason) == (None, "nothing of the parent can be reused")


def test_a_candidate_that_refuses_is_said():
    made = plan(costing(0.5, 1.0), candidate="patchkv:window=8")
    assert made.plan is None
    assert made.reason is not None
    assert "patchkv" in made.reason
