"""From drift to a length model: PatchKV's formulas 5 to 8.

Letters: `L` layers, `T` suffix tokens of one training pair, `H` KV heads, `D` head dim, `B` tokens a block, `N = ceil(T / B)`
blocks. Blocks are counted from the first suffix token, so that block b begins at distance `b·B` (**choice**).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentcache.errors import ConfigError
from agentcache.profiling.profile import DriftCurves, LengthFit
from agentcache.recovery.length_model import LengthModel, length_features

__all__ = [
    "EDGES",
    "BinnedDrift",
    "TrainingPair",
    "bin_drift",
    "block_deviation",
    "boundary",
    "coverage",
    "drift_curves",
    "fit_length",
    "fit_length_model",
    "oracle_boundary",
    "pinball_loss",
    "row_drift",
    "spread_layers",
]

Floats = npt.NDArray[np.float64]

BLOCK: Final = 32
QUANTILE: Final = 0.9
"""**choice**, formulas 8."""

PENALTY: Final = 0.01
"""L1 penalty on coefficients of standardised features (**choice**): pairs are few, and their lengths alike. It costs a
hundredth of the pinball loss a unit, and keeps what adds nothing at 0."""

EDGES: Final = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""Distances, in tokens, that the curves are cut at."""


@dataclass(frozen=True, slots=True)
class TrainingPair:
    """One training pair of adjacent revisions.

    Attributes:
        prefix: |P|.
        middle: |M_new|.
        suffix: |S|.
        deviation: δ_b of each block, `[N]`.
    """

    prefix: int
    middle: int
    suffix: int
    deviation: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BinnedDrift:
    """The drift of one pair's rows, summed by distance.

    Attributes:
        rows: Rows in each bin, `[E - 1]`.
        value: Their drift of values, summed, `[E - 1, L]`.
        key: The same of keys.
    """

    rows: npt.NDArray[np.int64]
    value: Floats
    key: Floats


def row_drift(stale: npt.ArrayLike, exact: npt.ArrayLike) -> Floats:
    """Returns `1 − cos` of each row over all its heads (PatchKV, formulas 5), float64 `[L, T]`; NaN where a row is zero.

    Args:
        stale: Values, or phase-corrected keys, of the old context, `[L, T, H, D]`.
        exact: Those of an exact prefill of the new one.
    """
    old, full = (np.asarray(rows, dtype=np.float64).reshape(*np.shape(rows)[:2], -1) for rows in (stale, exact))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine: Floats = (old * full).sum(-1) / np.sqrt((old * old).sum(-1) * (full * full).sum(-1))
    return np.maximum(1 - cosine, 0)


def spread_layers(layers: int, count: int = 4) -> tuple[int, ...]:
    """Returns L_d: `count` layers spread evenly over the depth (**choice**, formulas 6), ascending; all when there are fewer.

    The first layer is none of them: its values do not depend on the context.
    """
    if layers < 1 or count < 1:
        raise ConfigError(f"{count} of {layers} layers are not allowed; take 1 or more of 1 or more")
    places = np.round(np.linspace(0, layers - 1, count + 1)[1:]).astype(int)
    return tuple(sorted({int(at) for at in places}))


def block_deviation(drift: npt.ArrayLike, block: int = BLOCK) -> Floats:
    """Returns δ_b: the median over layers of the mean over a block's tokens (PatchKV, formulas 6), float64 `[N]`.

    Args:
        drift: Of values in the layers L_d, `[L_d, T]`, by distance.
        block: Tokens a block; the last one is as short as its tokens.
    """
    rows = np.asarray(drift, dtype=np.float64)
    starts = np.arange(0, rows.shape[1], block)
    if not len(starts):
        return np.zeros(0)
    tokens = np.diff(starts, append=rows.shape[1])
    means = np.add.reduceat(rows, starts, axis=1) / tokens
    medians: Floats = np.median(means, axis=0)
    return medians


def oracle_boundary(deviation: npt.ArrayLike, suffix: int, *, tau_v: float, gamma: float, block: int = BLOCK) -> int:
    """Returns d*: the least distance from which on a share γ of the blocks is clean, |S| when there is none (formulas 7).

    A tail `B_{x,≥d}` holds the blocks that begin at distance d or behind it; d goes by whole blocks (**choice**). A block whose
    deviation is NaN is not clean.

    Args:
        deviation: δ_b, `[N]`.
        suffix: |S|.
        tau_v: Deviation up to which a block is clean.
        gamma: Share of a tail's blocks that must be clean.
        block: Tokens a block.
    """
    clean = np.asarray(deviation, dtype=np.float64) <= tau_v
    tail = np.arange(len(clean), 0, -1)
    share = np.cumsum(clean[::-1])[::-1] / tail
    good = np.flatnonzero(share >= gamma - 1e-12)  # nine tenths of ten blocks are nine
    return int(good[0]) * block if len(good) else suffix


def boundary(pair: TrainingPair, *, tau_v: float, gamma: float, block: int = BLOCK) -> int:
    """Returns d* of a training pair, see `oracle_boundary`."""
    return oracle_boundary(pair.deviation, pair.suffix, tau_v=tau_v, gamma=gamma, block=block)


def pinball_loss(target: npt.ArrayLike, predicted: npt.ArrayLike, quantile: float) -> float:
    """Returns the mean pinball loss, which the length model minimises (PatchKV, formulas 8)."""
    over = np.asarray(target, dtype=np.float64) - np.asarray(predicted, dtype=np.float64)
    return float(np.maximum(quantile * over, (quantile - 1) * over).mean())


def fit_length_model(
    lengths: npt.ArrayLike,
    boundaries: npt.ArrayLike,
    *,
    quantile: float = QUANTILE,
    penalty: float = PENALTY,
) -> LengthModel:
    """Returns the length model fitted by quantile regression to `log1p d*` (PatchKV, formulas 8).

    Args:
        lengths: |P|, |M_new| and |S| of each pair, `[n, 3]`.
        boundaries: d* of each pair, `[n]`.
        quantile: That is fitted.
        penalty: See `PENALTY`.

    Raises:
        ConfigError: There is no pair, or the quantile does not lie between 0 and 1.
    """
    from sklearn.linear_model import QuantileRegressor

    target = np.log1p(np.asarray(boundaries, dtype=np.float64))
    if not len(target):
        raise ConfigError("a length model needs at least one training pair; measure on more data")
    if not 0 < quantile < 1:
        raise ConfigError(f"quantile={quantile} is not allowed; take one between 0 and 1")
    features = length_features(*np.asarray(lengths).T)[:, 1:]  # the regressor has its own intercept
    centre, scale = features.mean(0), features.std(0)
    scale[scale < 1e-9] = 1.0
    fitted = QuantileRegressor(quantile=quantile, alpha=penalty, solver="highs")
    fitted.fit((features - centre) / scale, target)
    slopes = fitted.coef_ / scale
    return LengthModel((float(fitted.intercept_ - slopes @ centre), *map(float, slopes)))


def coverage(model: LengthModel, pairs: Sequence[TrainingPair], boundaries: Sequence[int]) -> float:
    """Returns the share of pairs whose d* lies within the model's window; 1 for no pairs."""
    if not pairs:
        return 1.0
    lengths = np.array([(pair.prefix, pair.middle, pair.suffix) for pair in pairs])
    return float((model.windows(*lengths.T) >= np.asarray(boundaries)).mean())


def fit_length(
    train: Sequence[TrainingPair],
    calibration: Sequence[TrainingPair] = (),
    *,
    tau_v: float,
    gamma: float,
    layers: Sequence[int],
    quantile: float = QUANTILE,
    block: int = BLOCK,
) -> LengthFit:
    """Returns the length model of the training pairs and what it does on others (PatchKV, formulas 7 to 9).

    Args:
        train: At least one.
        calibration: Pairs of other tasks, for the coverage.
        tau_v: Deviation up to which a block is clean.
        gamma: Share of a tail's blocks that must be clean.
        layers: L_d.
        quantile: That is fitted.
        block: Tokens a block.

    Raises:
        ConfigError: There is no training pair.
    """

    def targets(pairs: Iterable[TrainingPair]) -> list[int]:
        return [boundary(pair, tau_v=tau_v, gamma=gamma, block=block) for pair in pairs]

    lengths = np.array([(pair.prefix, pair.middle, pair.suffix) for pair in train]).reshape(-1, 3)
    model = fit_length_model(lengths, targets(train), quantile=quantile)
    p, m, s = np.median(lengths, axis=0).astype(int).tolist()
    return LengthFit(
        coefficients=model.coefficients,
        quantile=quantile,
        tau_v=tau_v,
        gamma=gamma,
        layers=tuple(layers),
        pairs=len(train),
        typical=(p, m, s),
        coverage=coverage(model, calibration, targets(calibration)) if calibration else None,
    )


def bin_drift(
    distance: npt.ArrayLike, value: npt.ArrayLike, key: npt.ArrayLike, edges: Sequence[int] = EDGES
) -> BinnedDrift:
    """Returns one pair's drift by distance; rows whose drift is NaN in a layer are left out.

    Args:
        distance: d of each row, `[T]`.
        value: Drift of values, `[L, T]`.
        key: Drift of keys, `[L, T]`.
        edges: Ascending, the last one beyond every row.
    """
    at = np.searchsorted(edges, np.asarray(distance), side="right") - 1
    drift = np.stack([np.asarray(value, dtype=np.float64), np.asarray(key, dtype=np.float64)])  # [2, L, T]
    known = np.isfinite(drift).all(axis=(0, 1)) & (at >= 0) & (at < len(edges) - 1)
    sums = np.zeros((2, len(edges) - 1, drift.shape[1]))
    for out, rows in zip(sums, drift, strict=True):
        np.add.at(out, at[known], rows.T[known])
    return BinnedDrift(np.bincount(at[known], minlength=len(edges) - 1), sums[0], sums[1])


def drift_curves(pairs: Iterable[BinnedDrift], edges: Sequence[int] = EDGES) -> DriftCurves:
    """Returns the mean over all rows of all pairs; a bin without rows joins the one before it, or at the start the next one.

    Raises:
        ConfigError: No pair has a row.
    """
    binned = list(pairs)
    rows = sum((pair.rows for pair in binned), np.zeros(len(edges) - 1, dtype=np.int64))
    filled = np.flatnonzero(rows)
    if not len(filled):
        raise ConfigError("no row behind an edit was measured: the edits have no suffix; take other edits")
    last = int(filled[-1])
    kept = [edges[0], *(edges[at] for at in filled[1:].tolist()), edges[last + 1]]

    def means(name: str) -> tuple[tuple[float, ...], ...]:
        total: npt.NDArray[Any] = sum(getattr(pair, name) for pair in binned)
        return tuple(tuple(map(float, total[at] / rows[at])) for at in filled.tolist())

    return DriftCurves(edges=tuple(kept), rows=tuple(rows[filled].tolist()), value=means("value"), key=means("key"))
