"""The statistics of paired comparisons: intervals, tests and their correction (formulas, EditLocal 6). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RESAMPLES", "Record", "holm", "mean_ci", "paired_ci", "wilcoxon", "win_tie_loss"]

RESAMPLES: Final = 10_000
"""Of a bootstrap."""

_LEVEL: Final = 95  # % of the resamples that an interval holds
_ROWS = 1 << 22  # values drawn at a time

Floats = npt.NDArray[np.float64]


class Record(NamedTuple):
    """How often one policy beat another on the same items."""

    wins: int
    ties: int
    losses: int


def mean_ci(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % percentile interval of the mean over 10,000 resamples of the items.

    Args:
        values: One of each item.
        seed: Of the resamples; the same one gives the same interval.

    Raises:
        ValueError: There are no values, or one is not finite.
    """
    found = _finite(values)
    rng = np.random.default_rng(seed)
    step = max(1, _ROWS // len(found))
    means = np.concatenate(
        [
            found[rng.integers(len(found), size=(min(step, RESAMPLES - at), len(found)))].mean(axis=1)
            for at in range(0, RESAMPLES, step)
        ]
    )
    low, high = np.percentile(means, [(100 - _LEVEL) / 2, (100 + _LEVEL) / 2])
    return float(low), float(high)


def paired_ci(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Returns the interval of the mean of `a - b`, which is formed for each item before the items are resampled.

    Raises:
        ValueError: They differ in length, are empty, or hold a value that is not finite.
    """
    return mean_ci(_differences(a, b).tolist(), seed)


def wilcoxon(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p of Wilcoxon's signed-rank test over paired items; 1 where no pair differs.

    Raises:
        ValueError: They differ in length, are empty, or hold a value that is not finite.
    """
    from scipy.stats import wilcoxon as test

    differences = _differences(a, b)
    if not differences.any():
        return 1.0
    return float(test(differences).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Returns the p-values of one family after Holm's step-down correction, in their order.

    Raises:
        ValueError: One is not between 0 and 1.
    """
    found = np.asarray(ps, dtype=np.float64)
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"p-values lie between 0 and 1: {list(ps)}")
    order = np.argsort(found, kind="stable")
    corrected = np.minimum(np.maximum.accumulate(found[order] * np.arange(len(found), 0, -1)), 1.0)
    out = np.empty_like(corrected)
    out[order] = corrected
    return [float(p) for p in out]


def win_tie_loss(a: Sequence[float], b: Sequence[float], band: float = 0.05) -> Record:
    """Returns on how many items `a` is above `b`, within the band, and below.

    Args:
        a: One value of each item.
        b: The same items' values.
        band: Differences up to it, itself included, are ties.

    Raises:
        ValueError: They differ in length, are empty, or hold a value that is not finite.
    """
    differences = _differences(a, b)
    wins, losses = int((differences > band).sum()), int((differences < -band).sum())
    return Record(wins, len(differences) - wins - losses, losses)


def _differences(a: Sequence[float], b: Sequence[float]) -> Floats:
    if len(a) != len(b):
        raise ValueError(f"paired values must be of the same items: {len(a)} and {len(b)}")
    return _finite(a) - _finite(b)


def _finite(values: Sequence[float]) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if not found.size or not np.isfinite(found).all():
        raise ValueError(f"there must be at least one value, and finite ones: {found.tolist()[:8]}")
    return found
