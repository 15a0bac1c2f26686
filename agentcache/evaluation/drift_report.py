"""What `agentcache eval drift` writes: cells, a table of some distances, and one line a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentcache.evaluation.report import Column, Section, interval, new_figure, number, save_figure

__all__ = ["plot_drift", "sections"]

_SHOWN: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # blocks of the table: near ones are told apart, far ones are alike
_DRAWN_SHARE = 0.25  # of the pairs must reach a block that is drawn
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")  # Okabe and Ito

Cell = Mapping[str, Any]


def sections(cells: Sequence[Cell], layers: Sequence[Cell]) -> list[Section]:
    """Returns the tables: similarity by distance, and by layer."""
    model = Column("model", lambda row: str(row["model"]), left=True)
    by_distance = [
        model,
        Column("distance", lambda row: f"{row['distance']:,}"),
        Column("pairs", lambda row: str(row["n"])),
        Column("stale values", interval("value", "value_iqr", 3)),
        Column("keys, phase corrected", interval("key", "key_iqr", 3)),
        Column("keys, in place", interval("key_in_place", "key_in_place_iqr", 3)),
    ]
    by_layer = [
        model,
        Column("layer", lambda row: str(row["layer"])),
        *(
            Column(f"{title}, {where} block", number(f"{kind}_{where}", 3))
            for kind, title in (("value", "values"), ("key", "keys"))
            for where in ("first", "last")
        ),
    ]
    return [
        Section(
            "By distance",
            _shown(cells),
            by_distance,
            "Cosine to the exact rows, mean over layers and a block's tokens; median over pairs [quartiles]. Distance: first token "
            "of the block, counted from the end of the edit.",
        ),
        Section("By layer", list(layers), by_layer, "Median over pairs, first and last distance block of each."),
    ]


def _shown(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the cells of a few blocks, and of each model the last one that a quarter of its pairs reach."""
    last = {cell["model"]: cell["block"] for cell in cells if cell["n"] >= _DRAWN_SHARE * _most(cells, cell["model"])}
    return [
        cell
        for cell in cells
        if cell["block"] <= last[cell["model"]] and (cell["block"] in _SHOWN or cell["block"] == last[cell["model"]])
    ]


def _most(cells: Sequence[Cell], model: str) -> int:
    return max(int(cell["n"]) for cell in cells if cell["model"] == model)


def plot_drift(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Returns the files of the plot: values beside phase-corrected keys, a line with its quartiles for each model."""
    figure, axes = new_figure(2)
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    for axis, kind, title in zip(axes, ("value", "key"), ("stale values", "keys after phase correction"), strict=True):
        for at, model in enumerate(models):
            least = _DRAWN_SHARE * _most(cells, model)
            line = [cell for cell in cells if cell["model"] == model and cell["n"] >= least]
            colour = _COLOURS[at % len(_COLOURS)]
            distance = [cell["distance"] for cell in line]
            low, high = zip(*(cell[f"{kind}_iqr"] for cell in line), strict=True)
            axis.plot(distance, [cell[kind] for cell in line], color=colour, lw=1.8, label=model)
            axis.fill_between(distance, low, high, color=colour, alpha=0.15, lw=0)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("distance behind the edit, tokens")
    axes[0].set_ylabel("cosine to the exact rows")
    axes[1].legend(frameon=False, fontsize=9, loc="lower right")
    return save_figure(figure, out, "drift")
