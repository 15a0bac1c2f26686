"""Four plots of a profile, for people: PNG and SVG. Needs matplotlib, and nothing but the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from agentcache.errors import ConfigError
from agentcache.profiling.profile import Profile

__all__ = ["FORMATS", "PLOTS", "draw", "plot_profile"]

FORMATS: Final = ("png", "svg")

# Okabe and Ito: told apart by the colour-blind as well.
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PINK = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
_STYLE: Final = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10.0,
    "grid.alpha": 0.3,
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "svg.hashsalt": "agentcache",  # the same profile gives the same file
}


def plot_profile(profile: Profile, folder: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Returns the files that were written, each plot in each format; a plot that the profile has no data for is left out.

    Raises:
        ConfigError: matplotlib is not installed, or a format is none of `FORMATS`.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ConfigError(f"formats {unknown} are not allowed; take some of {', '.join(FORMATS)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in PLOTS:
        figure = draw(profile, name)
        for kind in formats if figure is not None else ():
            path = folder / f"{name}.{kind}"
            with _rc_context():
                figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def draw(profile: Profile, name: str) -> Any:
    """Returns one plot as a matplotlib figure, or None when the profile has no data for it.

    Args:
        profile: To be shown.
        name: One of `PLOTS`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    with _rc_context():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.8), layout="constrained")
        axes = figure.add_subplot()
        if not PLOTS[name](axes, profile):
            return None
        return figure


def _rc_context() -> Any:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'agentcache-kv[profile]'") from error
    return rc_context(_STYLE)


def _title(axes: Any, profile: Profile, title: str) -> None:
    axes.set_title(f"{title}\n{profile.model.name}, {profile.model.dtype}", loc="left", fontsize=11)


def _legend_beside(axes: Any) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _drift(axes: Any, profile: Profile) -> bool:
    """Draws drift of values by distance, a line a layer, and the window of the length model."""
    drift, fit = profile.drift, profile.length
    value, key = np.array(drift.value), np.array(drift.key)
    edges = np.array(drift.edges, dtype=float)
    places = np.sqrt(np.maximum(edges[:-1], edges[1] / 4) * edges[1:])  # the middle of a bin on a logarithmic axis
    shades = np.linspace(0.35, 0.9, value.shape[1])
    for at, layer in enumerate(drift.layers):
        label = f"values, layer {layer}"
        axes.plot(places, value[:, at], color=_BLUE, alpha=shades[at], lw=1.2, marker="o", ms=3, label=label)
    axes.plot(places, value.mean(1), color=_BLACK, lw=2.2, label="values, mean")
    axes.plot(places, key.mean(1), color=_ORANGE, lw=2.2, ls="--", label="keys, mean")
    axes.axhline(fit.tau_v, color=_RED, lw=1.2, ls=":", label=f"$\\tau_V$ = {fit.tau_v:g}: below it\na block is clean")
    prefix, middle, suffix = fit.typical
    window = int(fit.model.windows(prefix, middle, suffix))
    if window:
        text = f"fitted window: {window:,} tokens\nat the median edit\n(|P| {prefix:,}, |M| {middle:,}, |S| {suffix:,})"
        axes.axvspan(places[0] / 2, window, color=_GREEN, alpha=0.15, lw=0, label=text)
    axes.set(xscale="log", yscale="log", xlim=(places[0] / 2, edges[-1]))
    axes.set_xticks(edges[1:], [f"{edge:,.0f}" for edge in edges[1:]], rotation=45)
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel("distance behind the edit, tokens")
    axes.set_ylabel("drift of stale rows, 1 − cos")
    _title(axes, profile, "Drift falls with the distance from the edit")
    _legend_beside(axes)
    return True


def _attention(axes: Any, profile: Profile) -> bool:
    """Draws the stored attention of one prompt by position, with the edit, D and H."""
    example = profile.attention
    if example is None:
        return False
    block = example.block
    height = np.array(example.attention)
    starts = np.arange(len(height)) * block
    groups = (("restored", _SKY, set(range(len(height)))), ("dirty window D", _GREEN, set(example.dirty)))
    taken = {*example.dirty, *example.nonlocal_blocks}
    for label, colour, blocks in (*groups, ("nonlocal set H", _RED, set(example.nonlocal_blocks))):
        shown = np.array([at in blocks and (colour != _SKY or at not in taken) for at in range(len(height))])
        axes.bar(starts[shown], height[shown], width=block, align="edge", color=colour, lw=0, label=label)
    tops = height[list(example.nonlocal_blocks)] if example.nonlocal_blocks else np.zeros(0)
    middles = (np.array(example.nonlocal_blocks, dtype=int) + 0.5) * block
    axes.plot(middles, tops + 0.04, ls="none", marker="v", ms=6, color=_RED)
    # Blocks that are dirty but hardly attended to are seen on the axis.
    for _, run in groupby(enumerate(sorted(example.dirty)), key=lambda pair: pair[1] - pair[0]):
        stretch = [at for _, at in run]
        axes.axvspan(stretch[0] * block, (stretch[-1] + 1) * block, color=_GREEN, alpha=0.15, lw=0)
    start, stop = example.edit
    axes.axvspan(start, max(stop, start + block / 4), color=_BLACK, alpha=0.3, lw=0, label="edit")
    axes.set(xlim=(0, len(height) * block), ylim=(0, 1.12))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_xlabel("position in the new prompt, tokens")
    axes.set_ylabel(f"stored attention I, highest of a block of {block}")
    _title(axes, profile, f"Far tokens that are looked at: H at κ = {profile.kappa:.2%}")
    _legend_beside(axes)
    return True


def _quality(axes: Any, profile: Profile) -> bool:
    """Draws quality by recompute ratio, a line a block size, and the choice."""
    if not profile.candidates:
        return False
    colours = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY)
    ordered = sorted(profile.candidates, key=lambda each: (each.block, each.kappa))
    for colour, (block, group) in zip(cycle(colours), groupby(ordered, key=lambda each: each.block), strict=False):
        line = list(group)
        ratios = [each.recompute_ratio * 100 for each in line]
        quality = [each.mean_quality for each in line]
        spread = [
            [each.mean_quality - min(each.quality.values()) for each in line],
            [max(each.quality.values()) - each.mean_quality for each in line],
        ]
        axes.errorbar(
            ratios,
            quality,
            yerr=spread,
            color=colour,
            lw=1.6,
            marker="o",
            ms=5,
            elinewidth=0.8,
            capsize=3,
            label=f"blocks of {block}",
        )
    chosen = [each for each in ordered if (each.kappa, each.block) == (profile.kappa, profile.block)]
    for each in chosen:
        label = f"chosen: κ = {each.kappa:.2%}, blocks of {each.block}"
        axes.plot(
            each.recompute_ratio * 100,
            each.mean_quality,
            ls="none",
            marker="o",
            ms=13,
            mfc="none",
            mec=_RED,
            mew=2,
            label=label,
        )
    kappas = ", ".join(f"{kappa:.2%}" for kappa in sorted({each.kappa for each in ordered}))
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    axes.set_xlabel("rows of the suffix that are recomputed, %")
    axes.set_ylabel(profile.quality_unit)
    names = ", ".join(sorted(ordered[0].quality))
    _title(axes, profile, f"What recomputing buys (mean and range over {names})")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        title=f"points along a line, left to right:\nκ = {kappas}",
        title_fontsize=9,
        alignment="left",
    )
    return True


def _sensitivity(axes: Any, profile: Profile) -> bool:
    """Draws what one block in 4 bits does to the next token, by the block's risk, and how it is stored."""
    if not profile.sensitivity:
        return False
    limits = profile.precision
    risk = np.array([each.risk for each in profile.sensitivity])
    kl = np.array([each.kl for each in profile.sensitivity])
    residual = np.array([each.residual for each in profile.sensitivity])
    floor = max(kl[kl > 0].min(initial=np.inf) / 2 if (kl > 0).any() else 1e-9, 1e-12)
    least = max(risk[risk > 0].min(initial=np.inf) if (risk > 0).any() else 1e-6, 1e-9)
    exact = risk >= limits.tau_high
    four = (risk < limits.tau_low) & (residual <= limits.low_bit_residual)
    for label, colour, mark, shown in (
        ("K8/V4", _BLUE, "o", four),
        ("K8/V8", _ORANGE, "s", ~exact & ~four),
        ("16 bits", _RED, "^", exact),
    ):
        share = f"{shown.mean():.0%} of these blocks"
        axes.plot(
            np.maximum(risk[shown], least),
            np.maximum(kl[shown], floor),
            ls="none",
            marker=mark,
            ms=6,
            color=colour,
            alpha=0.8,
            label=f"stored as {label}: {share}",
        )
    axes.axvline(limits.tau_low, color=_BLACK, lw=1.2, ls=":", label=f"$\\tau_L$ = {limits.tau_low:.3g}")
    axes.axvline(limits.tau_high, color=_BLACK, lw=1.2, ls="--", label=f"$\\tau_H$ = {limits.tau_high:.3g}")
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("risk of the block, attention × residual")
    axes.set_ylabel("KL of the next token to the exact cache's, nats")
    _title(axes, profile, "One block in 4 bits, all others exact")
    _legend_beside(axes)
    return True


PLOTS: Final[dict[str, Callable[[Any, Profile], bool]]] = {
    "drift": _drift,
    "attention": _attention,
    "quality": _quality,
    "sensitivity": _sensitivity,
}
"""Each plot by name: draws into axes, and returns whether the profile has data for it."""
