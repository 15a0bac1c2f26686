"""Statistics against independent twins: scipy's bootstrap, sums over all signs, and examples done by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap, rankdata

from agentcache.evaluation.statistics import Record, holm, mean_ci, paired_ci, wilcoxon, win_tie_loss

VALUES = np.random.default_rng(3).gamma(2.0, 0.3, size=37).tolist()


def test_the_interval_is_that_of_scipys_percentile_bootstrap() -> None:
    low, high = mean_ci(VALUES)
    twin = bootstrap(
        (np.array(VALUES),), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(11)
    ).confidence_interval
    width = twin.high - twin.low
    assert abs(low - twin.low) < 0.05 * width and abs(high - twin.high) < 0.05 * width
    assert low < np.mean(VALUES) < high


def test_the_interval_depends_on_the_seed_alone_and_not_on_how_the_draws_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = mean_ci(VALUES, seed=4)
    assert mean_ci(VALUES, seed=4) == whole != mean_ci(VALUES, seed=5)
    monkeypatch.setattr("agentcache.evaluation.statistics._ROWS", 1000)
    assert mean_ci(VALUES, seed=4) == whole


def test_the_interval_of_one_value_is_that_value() -> None:
    assert mean_ci([0.75]) == (0.75, 0.75)


def test_pairs_stay_together_in_a_contrast() -> None:
    """Items differ far more than the two arms do on each: only the paired interval excludes 0."""
    a = [value + 0.01 for value in VALUES]
    low, high = paired_ci(a, VALUES)
    assert low == pytest.approx(0.01) == high
    apart = mean_ci(a)[0] - mean_ci(VALUES)[1]
    assert apart < 0


@given(st.lists(st.integers(-9, 9).filter(bool), min_size=3, max_size=9, unique_by=abs))
def test_wilcoxon_is_the_share_of_all_signs_that_are_as_lopsided(differences: list[int]) -> None:
    ranks = rankdata(np.abs(differences))
    centre = ranks.sum() / 2
    seen = abs(ranks[np.array(differences) > 0].sum() - centre)
    sums = [ranks[np.array(signs, dtype=bool)].sum() for signs in product((0, 1), repeat=len(ranks))]
    expected = np.mean([abs(total - centre) >= seen - 1e-9 for total in sums])
    assert wilcoxon([float(d) for d in differences], [0.0] * len(differences)) == pytest.approx(float(expected))


def test_arms_that_never_differ_have_p_1() -> None:
    assert wilcoxon(VALUES, VALUES) == 1.0


def test_holm_by_hand() -> None:
    # Sorted: 0.01·4, 0.02·3, 0.03·2 and 0.04·1; the third and fourth are pulled up to the second.
    assert holm([0.02, 0.01, 0.04, 0.03]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
def test_holm_lies_between_no_correction_and_bonferroni_and_keeps_the_order(ps: list[float]) -> None:
    corrected = holm(ps)
    assert all(p <= c <= min(1.0, p * len(ps)) + 1e-12 for p, c in zip(ps, corrected, strict=True))
    by_p = [c for _, c in sorted(zip(ps, corrected, strict=True))]
    assert by_p == sorted(by_p)


def test_a_difference_as_large_as_the_band_is_a_tie() -> None:
    assert win_tie_loss([1.0, 0.5, 0.25, 0.0], [0.0, 0.25, 0.5, 1.0], band=0.25) == Record(1, 2, 1)
    assert win_tie_loss([0.06, 0.04], [0.0, 0.0]) == Record(1, 1, 0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_that_say_nothing_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value, and finite ones"):
        mean_ci(values)


def test_values_of_other_items_are_refused() -> None:
    for compare in (paired_ci, wilcoxon, win_tie_loss):
        with pytest.raises(ValueError, match="of the same items: 2 and 1"):
            compare([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([0.5, 1.5])
