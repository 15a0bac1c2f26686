"""What is measured in which order, and how it becomes a `Profile`: pure functions over measurements.

```
train         drift of each pair, single blocks in 4 bits     ->  length models to try, the low-bit test, risks to try
calibration   recoveries by length model, κ and block; risks  ->  τ_V, κ, block, τ_L, τ_H, and what the length model covers
```

Nothing here knows a clock: the same measurements give the same profile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from agentcache.profiling.calibrate import TOLERANCE, choose_candidate, choose_precision, low_bit_limit, threshold_pairs
from agentcache.profiling.fit import drift_curves, fit_length
from agentcache.profiling.measure import Found, Pair, Wanted, training_pair
from agentcache.profiling.profile import (
    AttentionExample,
    BlockSensitivity,
    Candidate,
    LengthFit,
    Precision,
    PrecisionCandidate,
)
from agentcache.types import Run, clip_runs

__all__ = ["Measured", "Trained", "assemble", "calibration_wanted", "train", "train_wanted"]

GAMMA: Final = 0.98
"""γ (**choice**): all blocks of a tail are clean but one in fifty. A smaller share would let the first, most drifted blocks of a
long suffix pass as that share's exceptions."""

TAU_SHARES: Final = (0.6, 0.8)
"""τ_V is tried at these shares of the median deviation of the first blocks behind an edit (**choice**: models drift on their own
scales). On SmolLM2, at 4k tokens with the edit at 30 %, they give windows of 176 and 28 tokens; a share of 0.5 gives 269, which
with any κ is more than a tenth of the suffix."""

KAPPAS: Final = (0.0, 0.015, 0.05)
"""κ that are tried. 0 is there to compare with and is not chosen (**choice**): that a far token carries what was edited is rare in
edits of real text and decides the answer where it happens (EditLocal, derived items), so the least share is kept as insurance."""

BLOCKS: Final = (16, 32)
_KAPPA, _BLOCK = 0.015, 32  # the paper's, by which τ_V is chosen first

REPLY_TOKENS: Final = 8
"""Next tokens after the first that recoveries are compared on: one token alone says little of a reply."""

QUALITY_UNIT: Final = "probability that exact tokens keep, %"
"""100·exp(−KL), KL averaged over the tokens and pairs of a data set: the geometric mean over tokens of the exact distribution."""

ALPHA: Final = 0.5
"""α (**choice**): what one block in 4 bits does to the next tokens drowns in what 16-bit arithmetic rounds, so that no pair tells."""

BLOCKS_IN_FOUR_BITS: Final = 4
_SHOWN_BLOCKS = 240  # of them in the profile, about

Measured = Sequence[tuple[Pair, Found]]


@dataclass(frozen=True, slots=True)
class Trained:
    """What the training pairs gave.

    Attributes:
        fits: A length model for each τ_V.
        precisions: The ways to store a prompt that are tried, as `profile_pair` takes them.
    """

    fits: tuple[LengthFit, ...]
    precisions: tuple[dict[str, float], ...]


def train_wanted() -> Wanted:
    """Returns what is measured on training pairs."""
    return Wanted(blocks=BLOCKS_IN_FOUR_BITS, reply_tokens=REPLY_TOKENS)


def train(measured: Measured) -> Trained:
    """Returns what training pairs give."""
    found = [each for _, each in measured]
    stored = [each["stored"] for each in found]
    risk = [
        ALPHA * high + (1 - ALPHA) * mean
        for each in stored
        for high, mean in zip(each["risk_max"], each["risk_mean"], strict=True)
    ]
    rest = {"alpha": ALPHA, "low_bit_residual": low_bit_limit([x for each in stored for x in each["residual"]])}
    return Trained(
        fits=tuple(_fit(measured, (), tau_v) for tau_v in _taus(found)),
        precisions=tuple(
            {"tau_low": round(low, 6), "tau_high": round(high, 6), **rest} for low, high in threshold_pairs(risk)
        ),
    )


def _taus(found: Iterable[Found]) -> list[float]:
    """Returns the τ_V that are tried, to two digits."""
    first = float(np.median([each["last"]["deviation"][0] for each in found]))
    return [float(f"{share * first:.1e}") for share in TAU_SHARES]


def _fit(trained_on: Measured, calibration: Measured, tau_v: float) -> LengthFit:
    return fit_length(
        [training_pair(found) for _, found in trained_on],
        [training_pair(found) for _, found in calibration],
        tau_v=tau_v,
        gamma=GAMMA,
        layers=trained_on[0][1]["layers"],
    )


def calibration_wanted(trained: Trained) -> Wanted:
    """Returns what is measured on calibration pairs: every arm of every length model, and every precision."""
    return Wanted(
        arms=tuple(("patchkv", options) for fit in trained.fits for options in _arms(fit)),
        precisions=({"tag": "k8v8"}, *trained.precisions),
        reply_tokens=REPLY_TOKENS,
    )


def _arms(fit: LengthFit) -> list[dict[str, Any]]:
    """Returns the options of `patchkv` that are tried with a length model."""
    model = fit.model.to_text()
    return [{"length_model": model, "kappa": kappa, "block": block} for block in BLOCKS for kappa in KAPPAS]


def assemble(trained_on: Measured, calibration: Measured, trained: Trained) -> dict[str, Any]:
    """Returns the parts of a `Profile` that are measured.

    Args:
        trained_on: Measurements of `train_wanted` on training pairs.
        calibration: Measurements of `calibration_wanted` on pairs of other tasks.
        trained: What `train` gave for the training pairs.
    """
    first = [
        next(each for each in _candidates(fit, calibration) if (each.kappa, each.block) == (_KAPPA, _BLOCK))
        for fit in trained.fits
    ]
    fit = trained.fits[first.index(choose_candidate(first))]
    candidates = _candidates(fit, calibration)
    chosen = choose_candidate([each for each in candidates if each.kappa > 0])
    layers = trained_on[0][1]["layers"]
    return {
        "attention_layers": tuple(layers),
        "drift": drift_curves([found["curve"] for _, found in (*trained_on, *calibration)], layers),
        "length": _fit(trained_on, calibration, fit.tau_v),
        "kappa": chosen.kappa,
        "block": chosen.block,
        "candidates": candidates,
        "tolerance": TOLERANCE,
        "quality_unit": QUALITY_UNIT,
        "precision": _precision(trained, calibration),
        "sensitivity": _sensitivity(trained_on),
        "attention": _example(fit, chosen, calibration),
    }


def _candidates(fit: LengthFit, calibration: Measured) -> tuple[Candidate, ...]:
    """Returns what each κ and block size does with a length model (PatchKV, formulas 15)."""
    out = []
    for options in _arms(fit):
        kl: defaultdict[str, list[float]] = defaultdict(list)
        arms = [_arm(found, options) for _, found in calibration]
        for (pair, _), arm in zip(calibration, arms, strict=True):
            kl[pair.dataset].append(arm["kl"])
        out.append(
            Candidate(
                kappa=options["kappa"],
                block=options["block"],
                quality={name: round(100 * float(np.exp(-np.mean(values))), 4) for name, values in sorted(kl.items())},
                computed_tokens=round(float(np.mean([arm["computed"] for arm in arms])), 2),
                recompute_ratio=round(float(np.mean([arm["ratio"] for arm in arms])), 6),
            )
        )
    return tuple(out)


def _arm(found: Found, options: dict[str, Any]) -> dict[str, Any]:
    arm: dict[str, Any] = next(arm for arm in found["arms"] if arm["options"] == options)
    return arm


def _precision(trained: Trained, calibration: Measured) -> Precision:
    """Returns the smallest payload that keeps the quality within the tolerance of κ; none is larger than 8 bits everywhere."""

    def mean(name: str, at: int) -> float:
        return round(float(np.mean([found["precisions"][at][name] for _, found in calibration])), 9)

    candidates = [
        PrecisionCandidate(
            tau_low=how["tau_low"],
            tau_high=how["tau_high"],
            alpha=how["alpha"],
            kl=mean("kl", at),
            bytes_share=mean("bytes", at),
        )
        for at, how in enumerate(trained.precisions, start=1)
    ]
    eight_bits = mean("bytes", 0)
    smaller = [each for each in candidates if each.bytes_share < eight_bits] or candidates
    chosen = choose_precision(smaller, target_kl=-math.log1p(-TOLERANCE / 100))
    return Precision(
        tau_low=chosen.tau_low,
        tau_high=chosen.tau_high,
        alpha=chosen.alpha,
        low_bit_residual=trained.precisions[0]["low_bit_residual"],
        candidates=tuple(candidates),
    )


def _sensitivity(measured: Measured) -> tuple[BlockSensitivity, ...]:
    """Returns the blocks of all pairs, or of every second, third … one when those are many."""
    step = max(1, math.ceil(sum(len(found["blocks"]) for _, found in measured) / _SHOWN_BLOCKS))
    return tuple(
        BlockSensitivity(start=each["start"], risk=each["risk"], residual=each["residual"], kl=each["kl"])
        for _, found in measured[::step]
        for each in found["blocks"]
    )


def _example(fit: LengthFit, chosen: Candidate, calibration: Measured) -> AttentionExample | None:
    """Returns the longest calibration prompt with one edit, None when there is none."""
    single = [found for _, found in calibration if found["last"]["prefix"] == found["lengths"]["prefix"]]
    if not single:
        return None
    found = max(single, key=lambda each: each["last"]["suffix"])
    length, last = found["lengths"]["new"], found["last"]
    join = last["prefix"] + last["middle"]
    options = {"length_model": fit.model.to_text(), "block": chosen.block}

    def blocks(kappa: float) -> set[int]:
        runs = _arm(found, {**options, "kappa": kappa})["recompute"]
        rows = clip_runs((Run(*run) for run in runs), join, length)
        return {at for run in rows for at in range(run.start // chosen.block, -(-run.stop // chosen.block))}

    dirty = blocks(0.0)
    return AttentionExample(
        block=chosen.block,
        attention=tuple(_coarser(found["placed"], chosen.block)),
        edit=(last["prefix"], join),
        dirty=tuple(sorted(dirty)),
        nonlocal_blocks=tuple(sorted(blocks(chosen.kappa) - dirty)),
    )


def _coarser(placed: dict[str, Any], block: int) -> list[float]:
    """Returns the highest attention of blocks that are whole multiples of those measured."""
    scores = np.asarray(placed["attention"])
    tops: list[float] = np.maximum.reduceat(scores, np.arange(0, len(scores), block // placed["block"])).tolist()
    return tops
