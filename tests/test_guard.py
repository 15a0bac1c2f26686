"""The quality guard's arithmetic, choice and memory, without an engine."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.config import CacheConfig, GuardConfig
from agentcache.errors import ConfigError
from agentcache.events import PolicyFellBack
from agentcache.guard import QualityGuard, first_tokens, top_kl
from agentcache.quality import kl_divergence

# -- KL of the most likely tokens --------------------------------------------------------------------------------------


def logs(*weights: float) -> dict[int, float]:
    return {token: math.log(weight / math.fsum(weights)) for token, weight in enumerate(weights)}


weights = st.floats(1e-4, 1.0)
pairs = st.integers(2, 24).flatmap(
    lambda n: st.tuples(st.lists(weights, min_size=n, max_size=n), st.lists(weights, min_size=n, max_size=n))
)


@given(pairs, st.integers(1, 24))
def test_the_kl_of_the_top_tokens_is_a_lower_bound(pair: Any, top: int) -> None:
    p, q = (logs(*each) for each in pair)
    assert 0 <= top_kl(first_tokens(p, top), first_tokens(q, top)) <= kl_divergence(p, q) + 1e-5


@given(pairs)
def test_it_is_the_kl_when_all_tokens_are_listed(pair: Any) -> None:
    p, q = (logs(*each) for each in pair)
    assert top_kl(p, q) == pytest.approx(kl_divergence(p, q), abs=1e-9)


@given(st.lists(weights, min_size=2, max_size=24), st.integers(1, 24))
def test_a_distribution_is_not_far_from_itself(each: list[float], top: int) -> None:
    p = first_tokens(logs(*each), top)
    assert top_kl(p, p) == pytest.approx(0, abs=1e-9)


def test_it_is_that_of_the_formula() -> None:
    p, q = {1: 0.6, 2: 0.3}, {1: 0.2, 3: 0.5}
    # G = {2}: a proportional share of the rest, 0.8 * 0.3 / 0.4 = 0.6, is more than min q = 0.2.
    want = 0.6 * math.log(0.6 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.1 * math.log(0.1 / 0.6)
    found = top_kl(*({t: math.log(x) for t, x in d.items()} for d in (p, q)))
    assert found == pytest.approx(want)


def test_disjoint_top_tokens_are_far_apart() -> None:
    p, q = ({t: math.log(0.999) for t in (token,)} for token in (1, 2))
    assert top_kl(p, q) == pytest.approx(0.0, abs=1e-9)  # one token each: nothing excludes 1 from being as likely as 2
    p, q = ({**d, t: math.log(0.0005)} for d, t in ((p, 3), (q, 4)))
    assert top_kl(p, q) > 5


def test_logits_that_are_no_numbers_are_infinitely_far_off() -> None:
    assert top_kl(logs(0.9, 0.1), {0: math.nan, 1: math.nan}) == math.inf


def test_a_token_without_mass_adds_nothing() -> None:
    assert top_kl({0: 0.0, 1: -math.inf}, {0: 0.0, 1: -math.inf}) == 0


def test_a_sampled_token_beyond_the_most_likely_ones_is_left_out() -> None:
    assert [*first_tokens({9: -8.0, 1: -0.1, 2: -3.0}, 2)] == [1, 2]


# -- choice ------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=40), st.floats(0, 1), st.floats(0, 1), st.integers())
def test_a_larger_share_keeps_what_a_smaller_one_chose(version: str, a: float, b: float, seed: int) -> None:
    low, high = (QualityGuard(GuardConfig(share=x, seed=seed)) for x in sorted((a, b)))
    assert low.chooses(version) <= high.chooses(version)


def test_about_the_share_is_chosen_and_always_the_same() -> None:
    versions = [f"v{i}" for i in range(4000)]
    first, again, other = (QualityGuard(GuardConfig(share=0.25, seed=seed)) for seed in (1, 1, 2))
    chosen = [v for v in versions if first.chooses(v)]
    assert 900 < len(chosen) < 1100
    assert chosen == [v for v in versions if again.chooses(v)]
    assert chosen != [v for v in versions if other.chooses(v)]
    assert not any(map(QualityGuard(GuardConfig()).chooses, versions))
    assert all(map(QualityGuard(GuardConfig(share=1)).chooses, versions))


# -- strikes and falls -------------------------------------------------------------------------------------------------


def guard(**settings: Any) -> QualityGuard:
    return QualityGuard(
        GuardConfig(**{"share": 1, "max_kl": 1.0, "window": 4, "episode_strikes": 2, "policy_episodes": 2} | settings)
    )


def fall(guard: QualityGuard, episode: str, policy: str = "p") -> list[PolicyFellBack]:
    """Records what makes an episode fall back; returns all events of a fall."""
    return [each for i in range(2) for each in guard.record(episode, f"{episode}{i}", policy, 5.0, False)[1]]


def test_an_episode_falls_back_after_its_strikes_and_says_why() -> None:
    g = guard()
    checked, falls = g.record("e", "v1", "p", 2.5, True)
    assert checked.strike and checked.version == "v1" and checked.agreement == 1 and falls == ()
    assert g.objection("e", "p") is None
    _, (fell,) = g.record("e", "v2", "p", 3.25, False)
    assert (fell.scope, fell.episode, fell.policy) == ("episode", "e", "p")
    for said in ("'e'", "2 of its last 2", "'p'", "KL of 3.25", "max_kl=1", "guard.reset(episode='e')"):
        assert said in fell.reason
    assert g.objection("e", "p") == g.objection("e", "another policy") == fell.reason
    assert g.objection("f", "p") is None
    assert g.record("e", "v3", "p", 9.0, False)[1] == ()  # it was already under way


def test_a_result_at_the_bound_is_none_and_what_is_no_number_is_one() -> None:
    g = guard()
    assert not g.record("e", "v", "p", 1.0, True)[0].strike
    assert g.record("e", "v", "p", math.nan, True)[0].strike


def test_strikes_that_lie_far_apart_do_not_add_up() -> None:
    g = guard()
    for kl in (5.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0):
        assert g.record("e", "v", "p", kl, True)[1] == ()
    assert g.objection("e", "p") is None


def test_disagreement_is_a_strike_once_it_is_frequent_in_a_full_window() -> None:
    g = guard(min_top1=0.5)
    agreements = [False, False, True, False, True, True, False]
    strikes = [g.record(f"e{i}", "v", "p", 0.1, agrees)[0].strike for i, agrees in enumerate(agreements)]
    # The window is full at the fourth, 1 of 4; the last disagreement leaves 2 of 4, which is allowed.
    assert strikes == [False, False, False, True, False, False, False]


def test_a_policy_falls_back_with_its_episodes_and_others_go_on() -> None:
    g = guard()
    assert [each.scope for each in fall(g, "e")] == ["episode"]
    assert [each.scope for each in fall(g, "f", "q")] == ["episode"]
    of_episode, of_policy = fall(g, "g")
    assert (of_episode.scope, of_policy.scope, of_policy.policy) == ("episode", "policy", "p")
    assert "'p' off: 2 of its episodes" in of_policy.reason and "guard.reset(policy='p')" in of_policy.reason
    assert g.objection("new", "p") == of_policy.reason
    assert g.objection("new", "q") is None
    assert [each.scope for each in fall(g, "h")] == ["episode"]  # the policy falls once


def test_a_dropped_episode_is_forgotten_but_counts_for_its_policy() -> None:
    g = guard()
    fall(g, "e")
    g.forget("e")
    g.forget("unknown")
    assert g.objection("e", "p") is None and g.stats()["episodes"] == {}
    assert [each.scope for each in fall(g, "f")] == ["episode", "policy"]


def test_reset_tries_again_what_it_names() -> None:
    g = guard()
    fall(g, "e")
    fall(g, "f")
    assert not g.reset(episode="unknown") and not g.reset(policy="unknown")
    assert g.reset(episode="e")
    assert g.objection("e", "q") is None and g.objection("f", "q") is not None
    assert g.objection("e", "p") is not None  # the policy is still off
    assert g.reset(policy="p")
    assert g.objection("e", "p") is g.objection("f", "p") is None
    assert [each.scope for each in fall(g, "g")] == ["episode"]  # the count began anew
    fall(g, "h", "q")
    assert g.reset() and not g.reset()
    assert g.objection("g", "p") is g.objection("h", "q") is None
    assert g.stats()["policies"]["p"]["strikes"] == 6


def test_stats_count_results_and_misses_and_are_json() -> None:
    g = guard()
    g.record("e", "v1", "p", 0.5, True)
    fall(g, "e")
    for why in ("failed", "dropped", "dropped", "unfit"):
        g.missed("q", why)
    stats = json.loads(json.dumps(g.stats()))
    p, q = stats["policies"]["p"], stats["policies"]["q"]
    assert (p["agreed"], p["disagreed"], p["strikes"], p["fallen_episodes"], p["off"]) == (1, 2, 2, 1, None)
    assert p["mean_kl"] == pytest.approx(3.5) and p["max_kl"] == 5
    assert (q["agreed"], q["failed"], q["dropped"], q["unfit"], q["mean_kl"]) == (0, 1, 2, 1, 0)
    assert stats["share"] == 1 and list(stats["episodes"]) == ["e"]


@given(st.lists(st.tuples(st.sampled_from("efg"), st.sampled_from("pq"), st.floats(0, 3), st.booleans()), max_size=60))
def test_what_runs_exactly_is_what_fell_back_and_nothing_falls_twice(
    results: list[tuple[str, str, float, bool]],
) -> None:
    g = guard()
    fallen: set[tuple[str, str]] = set()
    for episode, policy, kl, agrees in results:
        for each in g.record(episode, "v", policy, kl, agrees)[1]:
            key = (each.scope, each.episode if each.scope == "episode" else each.policy)
            assert key not in fallen
            fallen.add(key)
        for e in "efg":
            for p in "pq":
                assert (g.objection(e, p) is not None) == (("episode", e) in fallen or ("policy", p) in fallen)
    counts = g.stats()["policies"].values()
    assert sum(each["agreed"] + each["disagreed"] for each in counts) == len(results)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_the_guard_is_off_by_default() -> None:
    assert CacheConfig().guard.share == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"guard": {"share": 1.5}}, "guard.share=1.5"),
        ({"guard": {"max_kl": 0}}, "guard.max_kl=0"),
        ({"guard": {"window": 2}}, "episode_strikes=3 never fit in window=2"),
        ({"guard": {"bound": 1}}, "guard.bound=1"),
        ({"guard": {"share": 0.1}, "engine_args": {"logprobs_mode": "processed_logprobs"}}, "leave it out"),
        ({"guard": {"share": 0.1}, "engine_args": {"max_logprobs": 5}}, "needs max_logprobs=20"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CacheConfig.build(**settings)


def test_other_log_probabilities_are_nobodys_business_while_the_guard_is_off() -> None:
    CacheConfig.build(engine_args={"logprobs_mode": "processed_logprobs", "max_logprobs": 5})
    CacheConfig.build(guard={"share": 0.1}, engine_args={"logprobs_mode": "raw_logprobs", "max_logprobs": -1})
