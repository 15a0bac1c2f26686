"""Choices on calibration data: κ and block size by minimax, and the thresholds of mixed precision (PatchKV, formulas 13 to 15)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from agentcache.errors import ConfigError
from agentcache.profiling.profile import Candidate, PrecisionCandidate

__all__ = ["TOLERANCE", "choose_candidate", "choose_precision", "low_bit_limit", "threshold_pairs", "worst_gaps"]

TOLERANCE: Final = 0.25
"""Points, formulas 15."""

_EXACT_SHARES: Final = (0.02, 0.05, 0.1, 0.2)
_EIGHT_BIT_SHARES: Final = (0.0, 0.05, 0.15)


def worst_gaps(candidates: Sequence[Candidate]) -> list[float]:
    """Returns each candidate's largest gap to the best one of a data set, in points (PatchKV, formulas 15).

    Raises:
        ConfigError: There is none, or they were not measured on the same data sets.
    """
    names = {frozenset(candidate.quality) for candidate in candidates}
    if len(names) != 1:
        measured = "; ".join(sorted(", ".join(sorted(name)) for name in names)) or "no candidate"
        raise ConfigError(f"candidates must be measured on the same data sets, got {measured}")
    best = {name: max(candidate.quality[name] for candidate in candidates) for name in candidates[0].quality}
    return [max(best[name] - candidate.quality[name] for name in best) for candidate in candidates]


def choose_candidate(candidates: Sequence[Candidate], tolerance: float = TOLERANCE) -> Candidate:
    """Returns the fastest candidate within the tolerance on every data set, else the one with the smallest worst gap.

    That is PatchKV's minimax rule (formulas 15): where no candidate stays within the tolerance of the best one everywhere, the
    worst gap decides and the rows to compute, which TTFT grows with, among equals. Then the smaller κ, then the smaller block.

    Raises:
        ConfigError: There is none, or they were not measured on the same data sets.
    """
    gaps = worst_gaps(candidates)

    def rank(at: int) -> tuple[float, float, float, int]:
        # Within the tolerance all gaps are alike. Rounded: a gap is a difference of measured points.
        gap = 0.0 if gaps[at] <= tolerance + 1e-9 else round(gaps[at], 9)
        return gap, candidates[at].computed_tokens, candidates[at].kappa, candidates[at].block

    return candidates[min(range(len(candidates)), key=rank)]


def threshold_pairs(risk: npt.ArrayLike) -> list[tuple[float, float]]:
    """Returns pairs (τ_L, τ_H) to be measured: those that tag given shares of the calibration blocks (**choice**).

    Args:
        risk: r_b of calibration blocks (formulas 13).

    Raises:
        ConfigError: There is no block with a finite risk.
    """
    known = np.asarray(risk, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        raise ConfigError("no calibration block has a finite risk; measure on more data")
    pairs = {
        (float(np.quantile(known, 1 - exact - eight)), float(np.quantile(known, 1 - exact)))
        for exact in _EXACT_SHARES
        for eight in _EIGHT_BIT_SHARES
    }
    return sorted(pairs)


def choose_precision(candidates: Sequence[PrecisionCandidate], target_kl: float) -> PrecisionCandidate:
    """Returns the smallest payload whose KL stays within the target, else the least KL (PatchKV, formulas 14; **choice**).

    Args:
        candidates: Measured on calibration data.
        target_kl: Quality target, in nats.

    Raises:
        ConfigError: There is none.
    """
    if not candidates:
        raise ConfigError("no precision thresholds were measured to choose from")
    within = [candidate for candidate in candidates if candidate.kl <= target_kl]
    if within:
        return min(within, key=lambda candidate: (candidate.bytes_share, candidate.kl))
    return min(candidates, key=lambda candidate: (candidate.kl, candidate.bytes_share))


def low_bit_limit(residual: npt.ArrayLike) -> float:
    """Returns the limit of the low-bit test: what 4 bits lose of the worst calibration row, in full hundredths above it.

    A row that loses more is like none that 4 bits were calibrated on (formulas 14; **choice**).

    Raises:
        ConfigError: There is no row with a finite residual.
    """
    known = np.asarray(residual, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        raise ConfigError("no calibration row has a finite residual; measure on more data")
    return math.ceil(round(float(known.max()) * 100, 6)) / 100
