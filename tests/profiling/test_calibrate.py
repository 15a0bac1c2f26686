"""The choices on calibration data against slow implementations of PatchKV's formulas 13 to 15."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import ConfigError
from agentcache.profiling.calibrate import (
    choose_candidate,
    choose_precision,
    low_bit_limit,
    threshold_pairs,
    worst_gaps,
)
from agentcache.profiling.profile import Candidate, PrecisionCandidate

points = st.integers(0, 40).map(lambda x: 90 + x / 8)


def candidate(kappa: float, block: int, quality: dict[str, float], computed_tokens: float) -> Candidate:
    return Candidate(kappa=kappa, block=block, quality=quality, computed_tokens=computed_tokens, recompute_ratio=0.1)


candidates = st.lists(
    st.builds(
        candidate,
        st.sampled_from([0.0, 0.01, 0.02]),
        st.sampled_from([16, 32]),
        st.fixed_dictionaries({"a": points, "b": points}),
        st.sampled_from([100.0, 110.0]),
    ),
    min_size=1,
    max_size=8,
)


def slow_choice(of: list[Candidate], tolerance: float) -> Candidate:
    """Formulas 15, step by step."""
    gaps = {id(c): max(max(o.quality[name] for o in of) - c.quality[name] for name in ("a", "b")) for c in of}
    near = [c for c in of if gaps[id(c)] <= tolerance]
    if not near:
        near = [c for c in of if gaps[id(c)] == min(gaps.values())]
    fast = [c for c in near if c.computed_tokens == min(o.computed_tokens for o in near)]
    small = [c for c in fast if c.kappa == min(o.kappa for o in fast)]
    return next(c for c in small if c.block == min(o.block for o in small))


@given(candidates, st.sampled_from([0.0, 0.25, 1.0]))
def test_the_choice_is_formula_15(of: list[Candidate], tolerance: float) -> None:
    assert choose_candidate(of, tolerance) == slow_choice(of, tolerance)


def test_within_the_tolerance_the_fastest_wins() -> None:
    slow = candidate(0.02, 32, {"a": 64.0, "b": 50.0}, 921.4)
    fast = candidate(0.01, 32, {"a": 63.75, "b": 50.0}, 905.4)
    bad = candidate(0.0, 32, {"a": 60.5, "b": 50.0}, 800.0)
    assert choose_candidate([bad, slow, fast]) == fast
    assert worst_gaps([bad, slow, fast]) == [3.5, 0.0, 0.25]


def test_where_none_is_within_the_tolerance_the_worst_dataset_decides() -> None:
    first = candidate(0.01, 32, {"a": 70.0, "b": 40.0}, 100.0)
    second = candidate(0.02, 32, {"a": 60.0, "b": 45.0}, 100.0)
    third = candidate(0.0, 32, {"a": 66.0, "b": 41.0}, 900.0)
    assert choose_candidate([first, second, third]) == third  # gaps 5, 10, 4


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ([], "no candidate"),
        ([candidate(0, 32, {"a": 1}, 1), candidate(0, 32, {"a": 1, "b": 2}, 1)], "same data sets, got a; a, b"),
    ],
)
def test_candidates_that_cannot_be_compared_are_an_error(of: list[Candidate], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_candidate(of)


def precision(kl: float, share: float) -> PrecisionCandidate:
    return PrecisionCandidate(tau_low=0.01, tau_high=0.02, alpha=0.5, kl=kl, bytes_share=share)


@given(st.lists(st.builds(precision, st.floats(0, 1), st.floats(0.3, 1)), min_size=1), st.floats(0, 1))
def test_thresholds_are_the_smallest_payload_within_the_target(of: list[PrecisionCandidate], target: float) -> None:
    chosen = choose_precision(of, target)
    within = [each for each in of if each.kl <= target]
    if within:
        assert chosen.kl <= target and chosen.bytes_share == min(each.bytes_share for each in within)
    else:
        assert chosen.kl == min(each.kl for each in of)


def test_no_thresholds_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no precision thresholds"):
        choose_precision([], 1.0)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60))
def test_threshold_pairs_ascend_and_lie_among_the_risks(risk: list[float]) -> None:
    pairs = threshold_pairs([*risk, float("nan"), float("inf")])
    assert pairs == sorted(set(pairs))
    assert all(min(risk) <= low <= high <= max(risk) for low, high in pairs)


def test_threshold_pairs_tag_the_shares_that_they_are_for() -> None:
    risk = np.arange(1000) / 1000
    shares = {
        (round((risk >= high).mean(), 3), round(((risk >= low) & (risk < high)).mean(), 3))
        for low, high in threshold_pairs(risk)
    }
    assert shares == {(exact, eight) for exact in (0.02, 0.05, 0.1, 0.2) for eight in (0.0, 0.05, 0.15)}


@given(st.lists(st.floats(0, 2), min_size=1))
def test_the_low_bit_limit_passes_every_calibration_row(residual: list[float]) -> None:
    limit = low_bit_limit([*residual, float("nan")])
    assert max(residual) <= limit + 1e-8 and limit < max(residual) + 0.01 + 1e-9
    assert limit == pytest.approx(round(limit, 2))


def test_the_limit_of_smollm2s_worst_row() -> None:
    assert low_bit_limit([0.1, 0.122]) == 0.13
    assert low_bit_limit([0.15]) == 0.15


@pytest.mark.parametrize("measure", [threshold_pairs, low_bit_limit])
def test_nothing_finite_is_an_error(measure: object) -> None:
    with pytest.raises(ConfigError, match="finite"):
        measure([float("nan")])  # type: ignore[operator]
