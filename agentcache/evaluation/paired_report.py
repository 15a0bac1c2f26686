"""From measurements of the paired-edit benchmark to its cells, tests, tables and plots. Pure but for the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from rich.console import Console

from agentcache.evaluation.paired_arms import BASELINE, DIAGNOSTICS, PAPER, REFERENCE, TRANSPLANT
from agentcache.evaluation.report import Column, Section, interval, new_figure, number, save_figure, write_report
from agentcache.evaluation.statistics import holm, mean_ci, paired_ci, wilcoxon, win_tie_loss
from agentcache.profiling.derived import margin_recovery

__all__ = ["BAND", "PRIMARY", "cells_from", "report"]

Row = dict[str, Any]
Name = tuple[str, int | None]
"""An arm: policy and budget."""

PRIMARY: Final = 32
"""The budget whose differences are tested."""

BAND: Final = 0.05
"""Margin recovery: differences up to it are ties."""

_TWICE: Final = ("attended", 2 * PRIMARY)

_TRANSPLANTS: Final = "transplants"

_NO_BUDGET: Final = ("edit_local_boundary",)  # of the paper's policies: it is tested beside the primary budget


@dataclass(frozen=True, slots=True)
class _Group:
    """The kept items of one cell.

    Attributes:
        cell: Condition, form, distance, tokens.
        drawn: Items that the model was asked.
        references: Of kept items, by draw.
        arms: Of each arm, its measurement of each kept item.
    """

    cell: Mapping[str, Any]
    drawn: int
    references: Mapping[int, Row]
    arms: Mapping[Name, Mapping[int, Row]]

    def recovery(self, arm: Name) -> dict[int, float]:
        """Returns an arm's margin recovery by draw."""
        return {
            draw: margin_recovery(
                row["margin"], self.references[draw]["stale_margin"], self.references[draw]["oracle_margin"]
            )
            for draw, row in self.arms[arm].items()
        }

    def both(self, a: Name, b: Name) -> tuple[list[float], list[float]]:
        """Returns the margin recoveries of two arms on the items that both repaired."""
        one, two = self.recovery(a), self.recovery(b)
        common = sorted(one.keys() & two.keys())
        return [one[draw] for draw in common], [two[draw] for draw in common]


def cells_from(rows: Iterable[Row], model: str) -> dict[str, Any]:
    """Returns `cells`, one for each condition, form, distance, policy and budget; `pairs`, the tests behind them; `per_item`.

    `per_item` holds each cell's draws and, by arm, margin recovery and share of recomputed tokens of each, None where it did not run:
    what the means are made of.

    Args:
        rows: References and arms, see `paired_edit`.
        model: Its name.
    """
    cells: list[Row] = []
    pairs: list[Row] = []
    per_item: list[Row] = []
    for group in _groups(rows):
        place = {"model": model, **group.cell, "condition": _condition(group.cell)}
        tested = [place | pair for pair in _tests(group)]
        pairs += tested
        policies = [pair for pair in tested if pair["family"] != _TRANSPLANTS]
        corrected = {(pair["a"], pair["k_a"]): pair["p_holm"] for pair in policies if pair["b"] == REFERENCE}
        corrected |= {(pair["b"], pair["k_b"]): pair["p_holm"] for pair in policies if pair["a"] == REFERENCE}
        for arm in sorted(group.arms, key=_order):
            cells.append(place | _cell(group, arm) | {"p_holm": corrected.get(arm)})
        per_item.append(place | _per_item(group))
    return {"primary_k": PRIMARY, "tie_band": BAND, "cells": cells, "pairs": pairs, "per_item": per_item}


def _condition(cell: Mapping[str, Any]) -> str:
    """Returns `direct`, `derived`, or `hard:FORM`: the paper's condition and the harder forms must not be taken for each other."""
    form: str = cell["form"]
    return cell["condition"] if form in ("direct", "table") else f"hard:{form}"


def _order(arm: Name) -> tuple[int, str, int]:
    name = arm[0]
    first = PAPER.index(name) if name in PAPER else -1 if name == BASELINE else len(PAPER)
    return first, name, arm[1] or 0


def _groups(rows: Iterable[Row]) -> list[_Group]:
    places: dict[tuple[Any, ...], tuple[Row, dict[int, Row], dict[Name, dict[int, Row]]]] = {}
    for row in rows:
        cell = row["cell"]
        _, references, arms = places.setdefault(tuple(cell.values()), (cell, {}, {}))
        if row["arm"] is None:
            references[row["draw"]] = row["row"]
        else:
            arms.setdefault((row["arm"]["policy"], row["arm"]["k"]), {})[row["draw"]] = row["row"]
    groups = []
    for _, (cell, references, arms) in sorted(places.items(), key=lambda place: _place_order(place[1][0])):
        kept = {draw: row for draw, row in references.items() if row["kept"]}
        whole = {name: {draw: row for draw, row in found.items() if draw in kept} for name, found in arms.items()}
        groups.append(_Group(cell, len(references), kept, {name: found for name, found in whole.items() if found}))
    return groups


def _place_order(cell: Row) -> tuple[Any, ...]:
    return cell["condition"] != "direct", cell["form"] != "table", cell["form"], cell["distance"], cell["tokens"]


def _cell(group: _Group, arm: Name) -> Row:
    """Returns what one arm shows on a group's items."""
    found = group.arms[arm]
    recovery = [*group.recovery(arm).values()]
    flips = [float(row["flip"]) for row in found.values()]
    kl = [1 - row["kl"] / group.references[draw]["stale_kl"] for draw, row in found.items()]
    exact = group.arms.get((BASELINE, None), {})
    ratios = [exact[draw]["ttft_ms"] / row["ttft_ms"] for draw, row in found.items() if draw in exact]
    out: Row = {
        "policy": arm[0],
        "k": arm[1],
        "n_drawn": group.drawn,
        "n_kept": len(found),
        "prompt_tokens": round(mean(group.references[draw]["tokens"] for draw in found)),
        "mr": round(mean(recovery), 4),
        "mr_ci": _rounded(mean_ci(recovery)),
        "flip": round(mean(flips), 4),
        "flip_ci": _rounded(mean_ci(flips)),
        "kl_recovery": round(mean(kl), 4),
        "kl_recovery_ci": _rounded(mean_ci(kl)),
        "repair_tokens": round(mean(row["repair_tokens"] for row in found.values()), 2),
        "recompute_ratio": round(mean(row["recompute_ratio"] for row in found.values()), 4),
        "ttft_ms": round(median(row["ttft_ms"] for row in found.values()), 1),
        "select_ms": round(median(row["select_ms"] for row in found.values()), 1),
        "speedup": round(median(ratios), 3) if ratios else None,
        "wins": None,
        "ties": None,
        "losses": None,
    }
    against = _against(group, arm)
    if against is not None:
        record = win_tie_loss(*group.both(arm, against), band=BAND)
        out |= {"wins": record.wins, "ties": record.ties, "losses": record.losses}
    return out


def _per_item(group: _Group) -> Row:
    draws = sorted(group.references)
    found = {arm: group.recovery(arm) for arm in sorted(group.arms, key=_order)}
    label = {arm: arm[0] if arm[1] is None else f"{arm[0]}@{arm[1]}" for arm in found}
    return {
        "draws": draws,
        "mr": {label[a]: [None if d not in mr else round(mr[d], 4) for d in draws] for a, mr in found.items()},
        "recompute_ratio": {
            label[a]: [None if d not in mr else group.arms[a][d]["recompute_ratio"] for d in draws]
            for a, mr in found.items()
        },
    }


def _against(group: _Group, arm: Name) -> Name | None:
    """Returns the reference at an arm's budget, at the primary one where it has none; None where it was not measured."""
    wanted = (REFERENCE, arm[1] if (REFERENCE, arm[1]) in group.arms else PRIMARY)
    return wanted if wanted in group.arms and wanted != arm and group.both(arm, wanted)[0] else None


def _tests(group: _Group) -> list[Row]:
    """Returns the paired tests of a group.

    The fifteen pairs of the paper's policies; each other policy against the reference; and each policy's transplanted rows against the
    same rows recomputed, at each budget. Each is a family of its own under Holm's correction; none pools cells. Other budgets and
    diagnostics are shown and not tested, as in the paper; `attended` is tested at twice the primary budget too.
    """
    paper = [(name, None if name in _NO_BUDGET else PRIMARY) for name in PAPER]
    mine = [arm for arm in paper if arm in group.arms]
    others = [
        arm
        for arm in sorted(group.arms, key=_order)
        if arm[0] not in (*PAPER, BASELINE, *DIAGNOSTICS)
        and not arm[0].startswith(TRANSPLANT)
        and (arm[1] in (None, PRIMARY) or arm == _TWICE)
        and _against(group, arm) is not None
    ]
    families: list[tuple[str, list[tuple[Name, Name]]]] = [
        ("paper", [*combinations(mine, 2)]),
        ("others", [(arm, against) for arm in others if (against := _against(group, arm)) is not None]),
        (
            _TRANSPLANTS,
            [(arm, own) for arm in sorted(group.arms, key=_order) if (own := _computed(arm)) and own in group.arms],
        ),
    ]
    return [pair for family, pairs in families for pair in _family(group, family, pairs)]


def _computed(arm: Name) -> Name | None:
    """Returns the arm that recomputes the rows which this one transplants; None for one that does not."""
    name, k = arm
    return (name.removeprefix(TRANSPLANT), k) if name.startswith(TRANSPLANT) else None


def _family(group: _Group, family: str, pairs: Sequence[tuple[Name, Name]]) -> list[Row]:
    found: list[Row] = []
    ps: list[float] = []
    for a, b in pairs:
        one, two = group.both(a, b)
        if not one:
            continue
        difference = mean(x - y for x, y in zip(one, two, strict=True))
        found.append(
            {
                "family": family,
                "a": a[0],
                "k_a": a[1],
                "b": b[0],
                "k_b": b[1],
                "n": len(one),
                "difference": round(difference, 4),
                "difference_ci": _rounded(paired_ci(one, two)),
            }
        )
        ps.append(wilcoxon(one, two))
    return [pair | {"p": p, "p_holm": q} for pair, p, q in zip(found, ps, holm(ps), strict=True)]


def _rounded(bounds: tuple[float, float]) -> list[float]:
    return [round(bound, 4) for bound in bounds]


def _p(row: Mapping[str, Any]) -> str:
    p = row["p_holm"]
    return "–" if p is None else f"{p:.1e}" if p < 0.001 else f"{p:.3f}"


def _record(row: Mapping[str, Any]) -> str:
    return "–" if row["wins"] is None else f"{row['wins']}/{row['ties']}/{row['losses']}"


_COLUMNS: Final = (
    Column("policy", lambda row: row["policy"], left=True),
    Column("K", lambda row: "–" if row["k"] is None else str(row["k"])),
    Column("n", lambda row: str(row["n_kept"])),
    Column("MR", interval("mr", "mr_ci")),
    Column("flip", interval("flip", "flip_ci")),
    Column("KL recovery", number("kl_recovery")),
    Column("W/T/L", _record),
    Column("p (Holm)", _p),
    Column("tokens", number("repair_tokens", 0)),
    Column("of S", number("recompute_ratio", 1, percent=True)),
    Column("TTFT ms", number("ttft_ms", 0)),
    Column("speedup", number("speedup")),
)


_PAIR_COLUMNS: Final = (
    Column("cell", lambda row: f"{row['condition']}, d = {row['distance']}", left=True),
    Column("policy", lambda row: row["b"], left=True),
    Column("K", lambda row: "–" if row["k_b"] is None else str(row["k_b"])),
    Column("n", lambda row: str(row["n"])),
    Column("difference", interval("difference", "difference_ci")),
    Column("p (Holm)", _p),
)


def report(out: Path, result: Mapping[str, Any], *, plots: bool, console: Console) -> None:
    """Writes a result's files and says which."""
    sections = []
    for name, cells in _by_place(result["cells"]).items():
        most = max(cells, key=lambda cell: cell["n_kept"])
        timed = next((cell["n_kept"] for cell in cells if cell["policy"] == BASELINE), 0)
        text = (
            f"{most['n_kept']} items kept of {most['n_drawn']} drawn, {most['prompt_tokens']:,} tokens; speedups of {timed} of them. "
            f"W/T/L and p against `{REFERENCE}`; Holm over the fifteen pairs of the paper's policies at K = {PRIMARY}, and over "
            "the others apart."
        )
        sections.append(Section(name, cells, _COLUMNS, text))
    if pairs := [pair for pair in result["pairs"] if pair["family"] == _TRANSPLANTS]:
        text = "Margin recovery of rows copied from a full prefill less that of the same rows recomputed, paired; Holm over a cell's."
        sections.append(Section("Transplanted against recomputed", pairs, _PAIR_COLUMNS, text))
    written = write_report(out, result, "Paired edits", sections)
    if plots and result["cells"]:
        written += _plots(out, result["cells"])
    for path in written:
        console.print(f"wrote {path}")


def _by_place(cells: Iterable[Row]) -> dict[str, list[Row]]:
    places: dict[str, list[Row]] = {}
    for cell in cells:
        name = f"{cell['model']}, {cell['condition']}, d = {cell['distance']}, from {cell['tokens']} tokens"
        places.setdefault(name, []).append(cell)
    return places


def _plots(out: Path, cells: Sequence[Row]) -> list[Path]:
    """Returns the files of two plots: margin recovery by budget, a panel for each cell, and by distance at the primary budget."""
    places = _by_place(cells)
    figure, axes = new_figure(len(places), width=4.2)
    for axis, (name, found) in zip(axes, places.items(), strict=True):
        for policy in dict.fromkeys(cell["policy"] for cell in found if cell["k"] is not None):
            line = sorted((cell["k"], cell["mr"]) for cell in found if cell["policy"] == policy and cell["k"])
            axis.plot(*zip(*line, strict=True), marker="o", label=policy)
        axis.set_title(name, fontsize=8)
        axis.set_xlabel("K")
        axis.set_xscale("log", base=2)
    axes[0].set_ylabel("margin recovery")
    axes[-1].legend(fontsize=6)
    written = save_figure(figure, out, "budget")
    figure, (axis,) = new_figure()
    table = [cell for cell in cells if cell["form"] == "table" and cell["k"] in (PRIMARY, 2 * PRIMARY, None)]
    for policy, k in dict.fromkeys((cell["policy"], cell["k"]) for cell in table):
        line = sorted((cell["distance"], cell["mr"]) for cell in table if (cell["policy"], cell["k"]) == (policy, k))
        axis.plot(*zip(*line, strict=True), marker="o", label=policy if k is None else f"{policy} {k}")
    axis.set_xlabel("tokens between the edit and the answer's text")
    axis.set_ylabel("margin recovery")
    if table:
        axis.legend(fontsize=6, ncols=2)
    return written + save_figure(figure, out, "distance")
