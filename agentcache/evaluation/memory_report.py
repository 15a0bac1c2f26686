"""What `agentcache eval memory` writes beside its JSON: tables, F1 against r, and what the mean shift explains by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentcache.evaluation.memory_arms import FULL
from agentcache.evaluation.memory_cells import AGAINST
from agentcache.evaluation.report import Column, Section, new_figure, number, save_figure
from agentcache.evaluation.stored import text_stored

__all__ = ["plot_memory", "plot_shift", "sections"]

_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")  # Okabe and Ito

Cell = Mapping[str, Any]


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Returns the tables: all arms, each against `AGAINST`, by category, retrieval, and the mean shift by layer."""
    arm = [
        Column("data", lambda cell: str(cell["dataset"]), left=True),
        Column("policy", lambda cell: str(cell["policy"]), left=True),
        Column("r", lambda cell: "–" if cell["r"] is None else f"{cell['r']:g}"),
        Column("stored as", lambda cell: str(cell["precision"]), left=True),
    ]
    scores = [
        Column("n", lambda cell: str(cell["n"])),
        Column("F1", _points("f1", "f1_ci")),
        Column("difference", _points("f1_diff", "f1_diff_ci")),
        Column("EM", _points("em")),
        Column("ROUGE-1", _points("rouge1")),
        Column("BLEU-1", _points("bleu1")),
        Column("KL", number("kl", 3)),
    ]
    cost = [
        Column("recomputed", number("recompute_ratio", 1, percent=True)),
        Column("TTFT, ms", number("ttft_ms", 0)),
        Column("speedup", number("speedup")),
        Column("restored from", lambda cell: text_stored(cell["stored"])),
    ]
    found = [
        Section(
            "Answers",
            result["cells"],
            [*arm, *scores, *cost],
            f"Scores and their paired differences to `{FULL}` in points, with 95 % bootstrap intervals over questions. KL: of the "
            "first token, a lower bound from the 20 most likely ones. Recomputed: share of the reused tokens.",
        ),
        Section(
            "Retrieval",
            result["retrieval"],
            [
                arm[0],
                Column("questions", lambda cell: str(cell["questions"])),
                Column("with known evidence", lambda cell: str(cell["known"])),
                Column("recall", number("recall", 1, percent=True)),
                Column("units", number("units", 1)),
                Column("prompt, tokens", number("prompt_tokens", 0)),
                Column("of them chunks", number("chunk_tokens", 0)),
                Column("s a question", number("seconds", 1)),
            ],
            "; ".join(f"{each['dataset']}: {each['evidence']}" for each in result["datasets"]) + ".",
        ),
    ]
    if result["pairs"]:
        found.append(
            Section(
                f"Against `{AGAINST}` at the same r",
                result["pairs"],
                [
                    arm[0],
                    Column("policy", lambda cell: str(cell["a"]), left=True),
                    *arm[2:],
                    Column("n", lambda cell: str(cell["n"])),
                    Column("F1 difference", _points("difference", "difference_ci")),
                    Column("p", number("p", 3)),
                    Column("recomputed", number("recompute_ratio_a", 1, percent=True)),
                    Column(f"by {AGAINST}", number("recompute_ratio_b", 1, percent=True)),
                ],
                "Paired over questions, in points, with 95 % bootstrap intervals; Wilcoxon's p, not corrected.",
            )
        )
    if result["by_category"]:
        category = Column("category", lambda cell: str(cell["category"]), left=True)
        found.append(
            Section("By category", result["by_category"], [arm[0], category, *arm[1:], *scores[:3], *cost[:1]])
        )
    if result["shift"]:
        found.append(
            Section(
                "What one offset a chunk explains, by layer",
                result["shift"],
                [
                    arm[0],
                    *arm[2:],
                    Column("layer", lambda cell: str(cell["layer"])),
                    *(
                        Column(f"{side}s: {title}", number(f"{side}_{name}", 1, percent=True))
                        for side in ("key", "value")
                        for name, title in (
                            ("error", "error"),
                            ("explained", "explained"),
                            ("explained_norm", "of the norm"),
                            ("probes", "unweighted"),
                            ("common", "at most"),
                        )
                    ),
                ],
                "Of the rows that `mean_shift` keeps. Error: relative, before the shift. Explained: share of the squared residual norm "
                "that the policy's weighted offset takes away (below 0 where it adds error). Unweighted: what the mean residual of each "
                "chunk's probes would. At most: what that of the kept rows themselves would.",
            )
        )
    return found


def _points(key: str, of: str = "") -> Callable[[Cell], str]:
    """Returns what writes a score in points, with its interval if it has one."""

    def text(cell: Cell) -> str:
        shown = f"{100 * cell[key]:.1f}"
        return f"{shown} [{100 * cell[of][0]:.1f}, {100 * cell[of][1]:.1f}]" if of else shown

    return text


def plot_memory(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Returns the files of the plot: F1 against r, a panel a data set, a line a policy of exactly stored chunks."""
    datasets = list(dict.fromkeys(cell["dataset"] for cell in cells))
    figure, axes = new_figure(len(datasets))
    policies = [p for p in dict.fromkeys(cell["policy"] for cell in cells) if p != FULL]
    for axis, dataset in zip(axes, datasets, strict=True):
        own = [cell for cell in cells if cell["dataset"] == dataset]
        full = next(cell for cell in own if cell["policy"] == FULL)
        axis.axhline(100 * full["f1"], color="#000000", lw=1.2, ls="--", label="full recompute")
        for at, policy in enumerate(policies):
            line = sorted(
                (c for c in own if c["policy"] == policy and c["precision"] == "exact" and c["r"] is not None),
                key=lambda cell: cell["r"],
            )
            if not line:
                continue
            f1 = [100 * cell["f1"] for cell in line]
            bounds = [
                [value - 100 * cell["f1_ci"][0] for value, cell in zip(f1, line, strict=True)],
                [100 * cell["f1_ci"][1] - value for value, cell in zip(f1, line, strict=True)],
            ]
            axis.errorbar(
                [cell["r"] for cell in line],
                f1,
                yerr=bounds,
                color=_COLOURS[at % len(_COLOURS)],
                marker="o",
                ms=4,
                lw=1.6,
                elinewidth=0.6,
                capsize=2,
                label=policy,
            )
        axis.set_title(f"{dataset}, {full['n']} questions", loc="left", fontsize=10)
        axis.set_xlabel("share r of the reused tokens")
        axis.set_xlim(-0.03, 1.0)
    axes[0].set_ylabel("F1, points")
    axes[-1].legend(frameon=False, fontsize=8)
    return save_figure(figure, out, "f1")


def plot_shift(cells: Sequence[Cell], out: Path) -> list[Path]:
    """Returns the files of the plot: the explained share by layer, keys beside values; nothing where nothing was measured."""
    shown = [cell for cell in cells if cell["precision"] == "exact"]
    if not shown:
        return []
    figure, axes = new_figure(2)
    groups = list(dict.fromkeys((cell["dataset"], cell["r"]) for cell in shown))
    for axis, side in zip(axes, ("key", "value"), strict=True):
        for at, (dataset, share) in enumerate(groups):
            line = [
                c for c in shown if (c["dataset"], c["r"]) == (dataset, share) and c[f"{side}_explained"] is not None
            ]
            layers, colour = [cell["layer"] for cell in line], _COLOURS[at % len(_COLOURS)]
            axis.plot(
                layers,
                [100 * cell[f"{side}_explained"] for cell in line],
                color=colour,
                lw=1.8,
                label=f"{dataset}, r = {share:g}",
            )
            for name, style in (("probes", "--"), ("common", ":")):
                axis.plot(layers, [100 * cell[f"{side}_{name}"] for cell in line], color=colour, lw=1, ls=style)
        axis.axhline(0, color="#000000", lw=0.8)
        axis.set_title(f"{side}s (dashed: without weights; dotted: the best offset)", loc="left", fontsize=10)
        axis.set_xlabel("layer")
    axes[0].set_ylabel("explained of the squared residual, %")
    axes[1].legend(frameon=False, fontsize=8)
    return save_figure(figure, out, "shift")
