"""From what each question showed to the cells, tables and plot of `agentcache eval qa`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agentcache.evaluation.items import Row
from agentcache.evaluation.report import Column, Section, interval, new_figure, number, save_figure
from agentcache.evaluation.scores import SCORES
from agentcache.evaluation.statistics import mean_ci, paired_ci, wilcoxon
from agentcache.evaluation.stored import shares_stored, text_stored

__all__ = ["AGAIN", "ALL", "BASE", "cells", "pareto_plot", "per_item", "sections"]

BASE: Final = "prefix_cache"
"""The exact arm, which everything is compared with."""

_MAY_REUSE_NOTHING: Final = (BASE, "auto")

AGAIN: Final = "exact_again"
"""The exact arm once more in other batches: what differs is rounding."""

ALL: Final = "all"
"""Of a cell that pools data sets or edits."""

_MEASURED: Final = ("recompute_ratio", "planned_ratio")

Cell = dict[str, Any]


def cells(rows: Sequence[Row], model: str, seed: int = 0) -> dict[str, list[Cell]]:
    """Returns `cells`, for each data set and edit, for each of both, and pooled; and `by_carrier`, pooled by the carrier's place.

    A cell's `f1_diff` is the mean over its questions of the arm's F1 less the exact arm's, with the 95 % interval of a
    bootstrap over questions and the p of Wilcoxon's signed-rank test, which is not corrected. The pooled cell is weighed by
    questions.

    Args:
        rows: Of `qa`, with the same arms each, at least one.
        model: Its name.
        seed: Of the bootstrap.
    """
    arms = [*rows[0]["arms"]]
    arms = sorted(arms, key=lambda arm: (arm != BASE, arm == AGAIN))
    datasets = sorted({row["dataset"] for row in rows})
    edits = list(dict.fromkeys(row["edit"] for row in rows))
    groups = [(d, e) for d in (ALL, *datasets) for e in (ALL, *edits)]
    found = []
    for dataset, edit in groups:
        inside = [row for row in rows if dataset in (ALL, row["dataset"]) and edit in (ALL, row["edit"])]
        if inside:
            where = {"model": model, "dataset": dataset, "edit": edit}
            found += [{**where, **_cell(inside, arm, seed)} for arm in arms]
    by_carrier = [
        {"model": model, "dataset": ALL, "edit": ALL, "carrier": carrier, **_cell(inside, arm, seed)}
        for carrier in dict.fromkeys(row["carrier"] for row in rows)
        for inside in [[row for row in rows if row["carrier"] == carrier]]
        for arm in arms
    ]
    return {"cells": found, "by_carrier": by_carrier}


def _cell(rows: Sequence[Row], arm: str, seed: int) -> Cell:
    own = [row["arms"][arm] for row in rows]
    base = [row["arms"][BASE] for row in rows]
    f1, exact = [each["f1"] for each in own], [each["f1"] for each in base]
    ttft, exact_ttft = [each["ttft_ms"] for each in own], [each["ttft_ms"] for each in base]
    means = {score: round(float(np.mean([each[score] for each in own])), 6) for score in SCORES}
    cell: Cell = {
        "policy": arm,
        "n": len(rows),
        "f1": means["f1"],
        "f1_ci": _rounded(mean_ci(f1, seed)),
        "em": means["em"],
        "rouge1": means["rouge1"],
        "bleu1": means["bleu1"],
        "ttft_ms": round(float(np.mean(ttft)), 3),
        "ttft_p50_ms": round(float(np.median(ttft)), 3),
        "speedup": round(float(np.mean(exact_ttft) / np.mean(ttft)), 4),
        "f1_diff": round(float(np.mean(np.subtract(f1, exact))), 6),
        "f1_diff_ci": _rounded(paired_ci(f1, exact, seed)),
        "f1_p": wilcoxon(f1, exact),
        "same_answer": round(float(np.mean([a["answer"] == b["answer"] for a, b in zip(own, base, strict=True)])), 6),
    }
    for name in _MEASURED:
        values = [each[name] for each in own if name in each]
        cell[name] = round(float(np.mean(values)), 6) if values else None
    cell["stored"] = shares_stored(each.get("stored", {}) for each in own)
    used = [each["used"] for each in own if "used" in each]
    cell["faults"] = sum("reason" in each and each["used"] not in _MAY_REUSE_NOTHING for each in own)
    cell["ran_exact"] = round(sum(name == BASE for name in used) / len(used), 6) if used else None
    return cell


def _rounded(bounds: tuple[float, float]) -> list[float]:
    return [round(bound, 6) for bound in bounds]


def per_item(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns each question's id and each arm's F1 and share of recomputed tokens, in the same order: what the means are made of."""
    arms = sorted(rows[0]["arms"])
    return {
        "id": [row["id"] for row in rows],
        "f1": {arm: [row["arms"][arm]["f1"] for row in rows] for arm in arms},
        "recompute_ratio": {arm: [row["arms"][arm].get("recompute_ratio") for row in rows] for arm in arms},
    }


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Returns the tables of a result: pooled, by the carrier's place, and F1 by data set and by edit."""
    pooled = [cell for cell in result["cells"] if cell["dataset"] == cell["edit"] == ALL]
    out = [
        Section(
            f"All {pooled[0]['n']} questions",
            pooled,
            [
                Column("policy", lambda cell: cell["policy"], left=True),
                Column("F1", _points("f1", "f1_ci")),
                Column("difference", _points("f1_diff", "f1_diff_ci")),
                Column("EM", _points("em")),
                Column("ROUGE-1", _points("rouge1")),
                Column("BLEU-1", _points("bleu1")),
                Column("TTFT, ms", number("ttft_ms", 0)),
                Column("speedup", number("speedup")),
                Column("recomputed of S", number("recompute_ratio", 1, percent=True)),
                Column("restored from", lambda cell: text_stored(cell["stored"])),
                Column("ran exactly", number("ran_exact", 0, percent=True)),
                Column("faults", number("faults", 0)),
            ],
            "Scores and differences in points, with 95 % bootstrap intervals over questions; the difference is the paired one to "
            f"`{BASE}`. `{AGAIN}` is that arm once more in other batches: rounding alone. A fault is a resume that the policy could not do: it "
            "recomputed more, and its answer counts.",
        )
    ]
    carriers = list(dict.fromkeys(cell["carrier"] for cell in result["by_carrier"]))
    out.append(
        _crossed(
            "F1 difference by the place of the answer",
            result["by_carrier"],
            "carrier",
            carriers,
            "The document that holds the answer lies behind the edit (`bridge`: and the edited one is needed too), inside it, or "
            "before it.",
        )
    )
    for title, key, other in (("data set", "dataset", "edit"), ("edit", "edit", "dataset")):
        some = [cell for cell in result["cells"] if cell[other] == ALL and cell[key] != ALL]
        out.append(_crossed(f"F1 difference by {title}", some, key, list(dict.fromkeys(cell[key] for cell in some))))
    return out


def _points(key: str, of: str = "") -> Any:
    """Returns what writes a score in points, with its interval if it has one."""

    def text(cell: Mapping[str, Any]) -> str:
        scaled: dict[str, Any] = {key: 100 * cell[key]}
        if not of:
            return number(key, 1)(scaled)
        scaled[of] = [100 * bound for bound in cell[of]]
        return interval(key, of, 1)(scaled)

    return text


def _crossed(title: str, some: Sequence[Cell], key: str, values: Sequence[str], text: str = "") -> Section:
    """Returns a table with a row for each policy and a column for each value of a key."""
    by_policy: dict[str, dict[str, Cell]] = {}
    for cell in some:
        by_policy.setdefault(cell["policy"], {})[cell[key]] = cell
    counts = {value: next(c["n"] for c in some if c[key] == value) for value in values}

    def written(value: str) -> Any:
        return lambda row: _points("f1_diff", "f1_diff_ci")(row["by"][value]) if value in row["by"] else "–"

    columns = [Column("policy", lambda row: row["policy"], left=True)]
    columns += [Column(f"{value} ({counts[value]})", written(value)) for value in values]
    rows = [{"policy": policy, "by": by} for policy, by in by_policy.items()]
    return Section(title, rows, columns, text)


def pareto_plot(out: Path, result: Mapping[str, Any]) -> list[Path]:
    """Returns the files of the plot: F1 difference by time to the first token, both against the exact arm; up and left is better.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pooled = [cell for cell in result["cells"] if cell["dataset"] == cell["edit"] == ALL and cell["policy"] != AGAIN]
    figure, [axis] = new_figure(width=7.5, height=4.6)
    best = -np.inf
    for cell in sorted(pooled, key=lambda cell: -float(cell["speedup"])):
        x, y = 1 / cell["speedup"], 100 * cell["f1_diff"]
        low, high = (100 * bound for bound in cell["f1_diff_ci"])
        on_front = y > best
        best = max(best, y)
        color = "C0" if on_front else "0.6"
        axis.errorbar(x, y, yerr=[[max(y - low, 0)], [max(high - y, 0)]], fmt="o", color=color, alpha=0.9, lw=0.8)
        axis.annotate(cell["policy"], (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8, color=color)
    axis.axhline(0, color="black", lw=0.6)
    axis.set_xlabel(f"mean time to the first token, of {BASE}'s")
    axis.set_ylabel("F1 difference, points (95 % interval)")
    model = result["provenance"]["model"]["name"]
    axis.set_title(f"{model}, {pooled[0]['n']} questions; coloured: no faster policy is better", fontsize=9)
    return save_figure(figure, out, "pareto")
