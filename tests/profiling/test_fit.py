"""The fits against direct, slow implementations of PatchKV's formulas 6 to 9."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from agentcache.errors import ConfigError
from agentcache.profiling.fit import (
    EDGES,
    TrainingPair,
    block_deviation,
    boundary,
    coverage,
    drift_curves,
    fit_length,
    fit_length_model,
    oracle_boundary,
)
from agentcache.recovery.length_model import length_features

drifts = st.floats(0, 2, width=32)


def slow_deviation(drift: list[list[float]], block: int) -> list[float]:
    """Formulas 6."""
    tokens = len(drift[0])
    return [
        statistics.median(statistics.fmean(layer[start : start + block]) for layer in drift)
        for start in range(0, tokens, block)
    ]


def slow_boundary(deviation: list[float], suffix: int, tau_v: float, gamma: Fraction, block: int) -> int:
    """Formulas 7, d by d."""
    for d in range(0, suffix, block):
        tail = [b for b in range(len(deviation)) if b * block >= d]
        if tail and Fraction(sum(deviation[b] <= tau_v for b in tail), len(tail)) >= gamma:
            return d
    return suffix


@given(
    st.integers(1, 70).flatmap(
        lambda tokens: st.lists(st.lists(drifts, min_size=tokens, max_size=tokens), min_size=1, max_size=5)
    ),
    st.sampled_from([1, 8, 32]),
)
@settings(deadline=None)
def test_block_deviation_is_formula_6(drift: list[list[float]], block: int) -> None:
    got = block_deviation(drift, block)
    assert got.tolist() == pytest.approx(slow_deviation(drift, block), rel=1e-9, abs=1e-12)


def test_no_suffix_has_no_blocks() -> None:
    assert block_deviation(np.zeros((4, 0))).shape == (0,)


@given(
    st.lists(st.one_of(drifts, st.just(math.nan)), max_size=40),
    drifts,
    st.integers(0, 100),
    st.sampled_from([1, 8, 32]),
    st.integers(1, 32),
)
def test_oracle_boundary_is_formula_7(deviation: list[float], tau_v: float, gamma: int, block: int, last: int) -> None:
    suffix = max(len(deviation) - 1, 0) * block + (min(last, block) if deviation else 0)
    got = oracle_boundary(deviation, suffix, tau_v=tau_v, gamma=gamma / 100, block=block)
    assert got == slow_boundary(deviation, suffix, tau_v, Fraction(gamma, 100), block)


def slow_quantile_fit(features: np.ndarray, target: np.ndarray, quantile: float, penalty: float) -> float:
    """Formulas 8 as a linear programme in (intercept, slopes, over, under); returns the least objective."""
    n, k = features.shape
    cost = np.concatenate(
        [[0.0, 0.0], np.full(2 * k, penalty), np.full(n, quantile / n), np.full(n, (1 - quantile) / n)]
    )
    ones = np.ones((n, 1))
    equal = np.concatenate([ones, -ones, features, -features, np.eye(n), -np.eye(n)], axis=1)
    return float(linprog(cost, A_eq=equal, b_eq=target, bounds=(0, None), method="highs").fun)


def slow_pinball(target: np.ndarray, predicted: np.ndarray, quantile: float) -> float:
    over = (target - predicted).tolist()
    return statistics.fmean(quantile * each if each >= 0 else (quantile - 1) * each for each in over)


@given(
    st.lists(
        st.tuples(st.integers(0, 8000), st.integers(0, 900), st.integers(1, 8000), st.floats(0, 1)),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([0.5, 0.75, 0.9]),
    st.sampled_from([0.0, 0.01]),
)
@settings(deadline=None, max_examples=40)
def test_the_length_model_minimises_the_pinball_loss(
    rows: list[tuple[int, int, int, float]], quantile: float, penalty: float
) -> None:
    lengths = np.array([row[:3] for row in rows])
    target = np.log1p([int(row[2] * row[3]) for row in rows])
    model = fit_length_model(lengths, np.expm1(target), quantile=quantile, penalty=penalty)
    features = length_features(*lengths.T)
    scale = features[:, 1:].std(0)
    scale[scale < 1e-9] = 1.0
    standard = (features[:, 1:] - features[:, 1:].mean(0)) / scale
    beta = np.array(model.coefficients)
    objective = slow_pinball(target, features @ beta, quantile) + penalty * np.abs(beta[1:] * scale).sum()
    assert objective == pytest.approx(slow_quantile_fit(standard, target, quantile, penalty), abs=1e-6)


def test_a_fit_finds_a_law_again() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 6000, (200, 3))
    boundaries = np.expm1(0.3 + 0.4 * np.log1p(lengths[:, 2])) * rng.uniform(0.5, 1.0, 200)
    model = fit_length_model(lengths, boundaries)
    windows = model.windows(*lengths.T)
    assert 0.85 <= (windows >= boundaries).mean() <= 0.95
    assert windows.mean() < 1.3 * boundaries.mean()


def test_training_pairs_give_a_fit_with_its_coverage() -> None:
    def pair(at: int) -> TrainingPair:
        dirty = 1 + at % 4
        return TrainingPair(500 + at, 100, 320, tuple([0.1] * dirty + [0.001] * (10 - dirty)))

    train, rest = [pair(at) for at in range(40)], [pair(at) for at in range(40, 60)]
    assert [boundary(each, tau_v=0.01, gamma=1.0) for each in train[:4]] == [32, 64, 96, 128]
    fit = fit_length(train, rest, tau_v=0.01, gamma=1.0, layers=(7, 14))
    assert (fit.pairs, fit.layers, fit.typical) == (40, (7, 14), (519, 100, 320))
    assert fit.coverage == coverage(fit.model, rest, [boundary(each, tau_v=0.01, gamma=1.0) for each in rest]) == 1.0
    assert fit.model.windows(519, 100, 320) == 128
    assert fit_length(train, tau_v=0.01, gamma=1.0, layers=(7,)).coverage is None


def test_coverage_counts_the_pairs_within_the_window() -> None:
    pairs = [TrainingPair(500, 100, 320, ())] * 4
    model = fit_length_model([(500, 100, 320)], [64])
    assert coverage(model, pairs, [0, 64, 65, 320]) == 0.5
    assert coverage(model, [], []) == 1.0


@pytest.mark.parametrize(
    ("lengths", "quantile", "said"),
    [(np.zeros((0, 3)), 0.9, "at least one training pair"), (np.ones((2, 3)), 1.0, r"quantile=1\.0")],
)
def test_what_cannot_be_fitted_is_named(lengths: np.ndarray, quantile: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_length_model(lengths, np.ones(len(lengths)), quantile=quantile)


def test_curves_are_means_over_the_rows_of_all_pairs() -> None:
    rng = np.random.default_rng(1)
    rows: dict[int, list[np.ndarray]] = {}
    curves = []
    for length in (20, 100, 700):
        drift = rng.random((length, 2, 3))  # value and key, three layers
        bins = np.digitize(np.arange(length), EDGES) - 1
        for at in np.unique(bins):
            rows.setdefault(int(at), []).append(drift[bins == at])
        means = {at: drift[bins == at].mean(axis=0) for at in np.unique(bins)}
        curves.append(
            {
                "from": [EDGES[at] for at in means],
                "tokens": [int((bins == at).sum()) for at in means],
                "value": [each[0].tolist() for each in means.values()],
                "key": [each[1].tolist() for each in means.values()],
            }
        )
    got = drift_curves(curves, layers=(4, 8, 12))
    assert got.edges == (0, 32, 64, 128, 256, 512, 1024) and got.layers == (4, 8, 12)
    for at, (value, key, count) in enumerate(zip(got.value, got.key, got.rows, strict=True)):
        whole = np.concatenate(rows[at])
        assert count == len(whole)
        assert value == pytest.approx(whole.mean(axis=0)[0]) and key == pytest.approx(whole.mean(axis=0)[1])


def test_a_bin_without_rows_joins_the_one_before_it() -> None:
    curve = {"from": [0, 4096], "tokens": [2, 3], "value": [[0.1], [0.2]], "key": [[0.1], [0.2]]}
    assert drift_curves([curve], layers=(0,)).edges == (0, 4096, 8192)


def test_no_rows_at_all_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no row behind an edit"):
        drift_curves([], layers=(0,))
