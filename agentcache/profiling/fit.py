"""From drift to a length model: PatchKV's formulas 6 to 9.

Letters: `L` layers, `T` suffix tokens of one training pair, `B` tokens a block, `N = ceil(T / B)` blocks. Blocks are
counted from the first suffix token, so that block b begins at distance `b·B` (**choice**).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentcache.errors import ConfigError
from agentcache.profiling.profile import DriftCurves, LengthFit
from agentcache.recovery.length_model import LengthModel, length_features

__all__ = [
    "EDGES",
    "TrainingPair",
    "block_deviation",
    "boundary",
    "coverage",
    "drift_curves",
    "fit_length",
    "fit_length_model",
    "oracle_boundary",
]

Floats = npt.NDArray[np.float64]

BLOCK: Final = 32
QUANTILE: Final = 0.9
"""**choice**, formulas 8."""

PENALTY: Final = 0.02
"""L1 penalty on the coefficients of standardised features (**choice**): pairs are few, and profiles are asked beyond their
lengths. On 30 draws of 40 made-up pairs from a known law, the window at three times the longest suffix had an 80 % interval of 17
to 4249 tokens without a penalty, 108 to 943 with 0.01, and 94 to 524 with 0.03 (true: 275); the share of unseen pairs within the
window rose from 0.85 to 0.88."""

EDGES: Final = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
"""First distance of each bin of the curves, in tokens."""


@dataclass(frozen=True, slots=True)
class TrainingPair:
    """One edit between adjacent revisions, and the aligned run behind it.

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


def drift_curves(curves: Iterable[Mapping[str, Any]], layers: Sequence[int]) -> DriftCurves:
    """Returns the mean drift of all pairs' rows by distance and layer.

    A bin that no pair has a row in joins the one before it.

    Args:
        curves: Of each pair, as `engine.profile_rpc` measures them: the first distances of its bins (`from`, all in `EDGES`), their
            `tokens`, and the mean drift of `value` and `key`, `[bins, L]`.
        layers: The L layers.

    Raises:
        ConfigError: No pair has a row.
    """
    tokens = np.zeros(len(EDGES), dtype=np.int64)
    sums = {name: np.zeros((len(EDGES), len(layers))) for name in ("value", "key")}
    for curve in curves:
        count = np.asarray(curve["tokens"], dtype=np.int64)
        at = np.searchsorted(EDGES, curve["from"])
        tokens[at] += count
        for name, total in sums.items():
            total[at] += count[:, None] * np.asarray(curve[name], dtype=np.float64)
    filled = np.flatnonzero(tokens)
    if not len(filled):
        raise ConfigError("no row behind an edit was measured: the edits have no suffix; take other edits")
    last = EDGES[filled[-1] + 1] if filled[-1] + 1 < len(EDGES) else 2 * EDGES[-1]
    value, key = (tuple(map(tuple, (total[filled] / tokens[filled, None]).tolist())) for total in sums.values())
    return DriftCurves(
        edges=(*(EDGES[at] for at in filled.tolist()), last),
        layers=tuple(layers),
        rows=tuple(tokens[filled].tolist()),
        value=value,
        key=key,
    )
