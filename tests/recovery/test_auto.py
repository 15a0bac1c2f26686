"""Policy `auto` without an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.config import CacheConfig
from agentcache.errors import ConfigError
from agentcache.recovery import Attended, Auto, Bounds, EditLocal, check_policy, get_policy, plan
from agentcache.recovery.auto import auto_arms, auto_candidate
from agentcache.recovery.bounds import Bounded, BoundedOnline
from agentcache.recovery.conformance import scenarios
from tests.profiling.examples import example_profile

seconds = st.floats(1e-6, 1e3)


def test_it_selects_what_its_candidate_selects():
    auto, other = Auto("edit_local:k=48"), EditLocal(48)
    for scenario in scenarios():
        assert list(auto.select(scenario.context)) == list(other.select(scenario.context))


@pytest.mark.parametrize("candidate", ["edit_local:k=5", "direct_reuse", "epic:max_share=0.1"])
def test_it_conforms_with_any_candidate(candidate):
    check_policy(Auto(candidate))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"candidate": "auto"}, "is itself"),
        ({"candidate": "prefix_cache"}, "is exact"),
        ({"candidate": "nope"}, "unknown policy 'nope'"),
        ({"candidate": "edit_local:k=-1"}, "k=-1"),
        ({"candidate": "edit_local:window=3"}, "no option 'window'"),
        ({"margin": 1.0}, "margin=1.0"),
        ({"margin": -0.1}, "margin=-0.1"),
        ({"margin": float("nan")}, "margin=nan"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        get_policy("auto", options)


@given(exact=seconds, lossy=seconds, margin=st.floats(0, 0.99))
def test_the_candidate_must_save_its_margin(exact, lossy, margin):
    auto = Auto(margin=margin)
    if auto.accepts(exact, lossy):
        assert lossy < exact
        assert exact - lossy > margin * exact * (1 - 1e-9)
    else:
        assert lossy >= (1 - margin) * exact


def test_its_arms_are_the_policy_and_itself():
    auto = Auto("edit_local:k=48")
    assert auto_arms(auto) == (auto, EditLocal(48))
    assert auto_arms(EditLocal()) is None
    assert auto_arms(get_policy("edit_local", {"max_tokens": 8})) is None


def test_bounds_of_auto_bound_its_candidate():
    found = auto_arms(get_policy("auto", {"max_tokens": 8}))
    assert found is not None
    assert found[1] == Bounded(EditLocal(), Bounds(max_tokens=8))
    online = auto_arms(get_policy("auto", {"candidate": "attended:k=16", "max_share": 0.1}))
    assert online is not None
    assert online[1] == BoundedOnline(Attended(k=16), Bounds(max_share=0.1))


def test_the_candidate_goes_by_its_own_name():
    _, lossy = auto_arms(Auto("epic:k=4")) or (None, None)
    assert lossy is not None
    scenario = next(s for s in scenarios() if s.title == "insertion")
    assert plan(lossy, scenario.context, parent_exact_end=400, limit=400).policy == "epic"


def test_a_cache_gives_the_candidate_what_the_profile_knows_of_it(tmp_path):
    path = tmp_path / "profile.json"
    example_profile(example_profile().model.model_copy(update={"name": "owner/name"})).save(path)
    options = {"candidate": "patchkv:kappa=0.25"}
    config = CacheConfig.build(model="owner/name", profile=path, policy="auto", policy_options=options)
    assert config.measured is not None
    options = config.options_for("auto", config.policy_options)
    candidate = auto_candidate(options)
    assert candidate == ("patchkv", config.measured.options_for("patchkv", {"kappa": 0.25}))
    assert get_policy("auto", options).lossy == get_policy(*candidate)


@pytest.mark.parametrize(("candidate", "measures"), [("edit_local", False), ("patchkv:window=9", True)])
def test_saves_measure_what_the_candidate_reads(candidate, measures):
    config = CacheConfig.build(model="nowhere", policy="auto", policy_options={"candidate": candidate})
    assert config.to_connector().attention == measures
    assert config.options_for("auto", config.policy_options) == {"candidate": candidate}
