"""From what each question showed to the cells of `agentcache eval memory`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from agentcache.evaluation.items import Row
from agentcache.evaluation.memory_arms import FULL, MemoryArm
from agentcache.evaluation.scores import SCORES
from agentcache.evaluation.statistics import mean_ci, paired_ci, wilcoxon
from agentcache.evaluation.stored import shares_stored

__all__ = ["cells_of", "pairs_of", "retrieval_of", "shift_of"]

EDIT: Final = "chunks"
"""What stands in the place of an edit in cells: chunks that were encoded alone are reused in another order."""

AGAINST: Final = "cacheblend"
"""The policy that the others are paired with at the same share."""

_DIGITS: Final = 6

Cell = dict[str, Any]


def cells_of(
    rows: Sequence[Row], model: str, arms: Sequence[MemoryArm], seed: int = 0
) -> tuple[list[Cell], list[Cell]]:
    """Returns one cell an arm and data set over all its questions; and the same by the data set's category of questions.

    `f1_diff` is the mean over questions of the arm's F1 less full recompute's, with the 95 % interval of a bootstrap over questions
    and the p of Wilcoxon's signed-rank test, which is not corrected. `kl` is the mean of a lower bound of the first token's KL from
    full recompute's, of the 20 most likely tokens. `speedup` is of mean times to the first token; `stored` the shares of the
    precisions in what was restored, some of which stay exact under every one (`mixed`, and each unit's first rows).

    Args:
        rows: Of `memory`, of any data sets, at least one.
        model: Its name.
        arms: That each row has, full recompute among them.
        seed: Of the bootstrap.
    """
    pooled: list[Cell] = []
    by_category: list[Cell] = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == dataset]
        where = {"model": model, "dataset": dataset, "edit": EDIT}
        pooled += [{**where, **_cell(own, arm, seed)} for arm in arms]
        for category in sorted({row["category"] for row in own} - {""}):
            some = [row for row in own if row["category"] == category]
            by_category += [{**where, "category": category, **_cell(some, arm, seed)} for arm in arms]
    return pooled, by_category


def _cell(rows: Sequence[Row], arm: MemoryArm, seed: int) -> Cell:
    own = [row["arms"][arm.name] for row in rows]
    full = [row["arms"][FULL] for row in rows]
    f1, base = [each["f1"] for each in own], [each["f1"] for each in full]
    ttft = _mean([each["ttft_ms"] for each in own])
    return {
        "policy": arm.policy,
        "r": arm.r,
        "precision": arm.precision,
        "n": len(rows),
        **{score: _mean([each[score] for each in own]) for score in SCORES},
        "f1_ci": _bounds(mean_ci(f1, seed)),
        "f1_diff": _mean(np.subtract(f1, base)),
        "f1_diff_ci": _bounds(paired_ci(f1, base, seed)),
        "f1_p": wilcoxon(f1, base),
        "kl": _mean([each["kl"] for each in own]),
        "ttft_ms": ttft,
        "ttft_p50_ms": round(float(np.median([each["ttft_ms"] for each in own])), _DIGITS),
        "speedup": round(_mean([each["ttft_ms"] for each in full]) / ttft, _DIGITS),
        "recompute_ratio": _mean([each["recompute_ratio"] for each in own]),
        "reused_share": _mean(
            [each["source_tokens"] / row["prompt_tokens"] for each, row in zip(own, rows, strict=True)]
        ),
        "stored": shares_stored(each.get("stored", {}) for each in own),
        "faults": sum(each["reason"] is not None for each in own) if arm.policy != FULL else 0,
    }


def pairs_of(rows: Sequence[Row], model: str, arms: Sequence[MemoryArm], seed: int = 0) -> list[Cell]:
    """Returns each arm's F1 less that of `cacheblend` at the same share and precision, by data set, over the same questions.

    `difference_ci` is the 95 % interval of a bootstrap over questions, `p` of Wilcoxon's signed-rank test, not corrected.
    `mean_shift` recomputes up to 2r where `cacheblend` recomputes r: both `recompute_ratio`s stand beside it.
    """
    out = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = [row["arms"] for row in rows if row["dataset"] == dataset]
        for arm in arms:
            other = MemoryArm(AGAINST, arm.share, arm.precision)
            if arm.share is None or arm.policy == AGAINST or other not in arms:
                continue
            a, b = ([each[name]["f1"] for each in own] for name in (arm.name, other.name))
            ratios = [_mean([each[name]["recompute_ratio"] for each in own]) for name in (arm.name, other.name)]
            out.append(
                {
                    "model": model,
                    "dataset": dataset,
                    "a": arm.policy,
                    "b": AGAINST,
                    "r": arm.share,
                    "precision": arm.precision,
                    "n": len(own),
                    "difference": _mean(np.subtract(a, b)),
                    "difference_ci": _bounds(paired_ci(a, b, seed)),
                    "p": wilcoxon(a, b),
                    "recompute_ratio_a": ratios[0],
                    "recompute_ratio_b": ratios[1],
                }
            )
    return out


def retrieval_of(rows: Sequence[Row]) -> list[Cell]:
    """Returns how much of the evidence stood in the prompts, and how long those were, by data set."""
    out = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == dataset]
        known = [row["recall"] for row in own if row["recall"] is not None]
        out.append(
            {
                "dataset": dataset,
                "questions": len(own),
                "known": len(known),
                "recall": _mean(known) if known else None,
                "units": _mean([row["units"] for row in own]),
                "prompt_tokens": _mean([row["prompt_tokens"] for row in own]),
                "chunk_tokens": _mean([row["chunk_tokens"] for row in own]),
                "seconds": _mean([row["seconds"] for row in own]),
            }
        )
    return out


def shift_of(rows: Sequence[Row], model: str) -> list[Cell]:
    """Returns, by data set, share, precision and layer, what one offset a chunk explains of the error of reused rows.

    Sums over all kept rows of all questions, for keys and values:

        explained   1 − Σ‖fresh − shifted‖² / Σ‖fresh − reused‖²   what the policy's weighted offset from its probes takes away
        probes      1 − Σ‖fresh − reused − p̄‖² / Σ‖fresh − reused‖²   what the mean residual of a chunk's probes would, without weights
        common      1 − Σ‖fresh − reused − r̄‖² / Σ‖fresh − reused‖²   the most that one such offset could
        error       √(Σ‖fresh − reused‖² / Σ‖fresh‖²)               relative, before the shift

    `*_norm` is the same share of the norm instead of its square, `1 − √(1 − explained)`. None where nothing is to be explained:
    rows of the first layer know no context.
    """
    groups = dict.fromkeys((row["dataset"], row["share"], row["precision"]) for row in rows)
    out = []
    for dataset, share, precision in groups:
        own = [r for r in rows if (r["dataset"], r["share"], r["precision"]) == (dataset, share, precision)]
        for layer in range(len(own[0]["key"]["norm"])):
            cell: Cell = {
                "model": model,
                "dataset": dataset,
                "r": share,
                "precision": precision,
                "layer": layer,
                "n": len(own),
                "kept_tokens": sum(row["kept"] for row in own),
                "probe_tokens": sum(row["probes"] for row in own),
            }
            for side in ("key", "value"):
                sums = {
                    name: sum(row[side][name][layer] for row in own)
                    for name in ("norm", "residual", "left", "without_probes", "without_common")
                }
                cell |= {f"{side}_{name}": value for name, value in _explained(**sums).items()}
            out.append(cell)
    return out


_NOTHING: Final = 1e-5
"""Relative error of rows up to which there is nothing to explain: what rotating keys in 16 bits rounds is above it, and is kept."""


def _explained(
    norm: float, residual: float, left: float, without_probes: float, without_common: float
) -> dict[str, float | None]:
    error = (residual / norm) ** 0.5 if norm else 0.0
    if error <= _NOTHING:
        return {"error": _round(error), **dict.fromkeys(("explained", "explained_norm", "probes", "common"))}
    return {
        "error": _round(error),
        "explained": _round(1 - left / residual),
        "explained_norm": _round(1 - (left / residual) ** 0.5),
        "probes": _round(1 - without_probes / residual),
        "common": _round(1 - without_common / residual),
    }


def _mean(values: Any) -> float:
    return _round(float(np.mean(values)))


def _round(value: float) -> float:
    return round(value, _DIGITS)


def _bounds(bounds: tuple[float, float]) -> list[float]:
    return [_round(bound) for bound in bounds]
