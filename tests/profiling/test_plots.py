from __future__ import annotations

import builtins
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from agentcache.errors import ConfigError
from agentcache.profiling.plots import PLOTS, draw, plot_profile
from agentcache.profiling.profile import Profile
from tests.profiling.examples import example_profile

PNG = b"\x89PNG\r\n\x1a\n"


def texts(figure: Any) -> list[tuple[str, Any]]:
    """Returns every text that is seen and the box that it takes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    unseen = set()  # labels of ticks beyond the end of an axis, which are there but not drawn
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        unseen |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    shown = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in unseen
    ]
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in shown]


@pytest.mark.parametrize("name", PLOTS)
def test_no_text_overlaps_another_or_leaves_the_figure(name: str) -> None:
    figure = draw(example_profile(), name)
    found = texts(figure)
    for (one, a), (other, b) in combinations(found, 2):
        assert a == b or not a.padded(-1).overlaps(b.padded(-1)), (one, other)
    whole = figure.bbox.padded(2)
    outside = [text for text, box in found if not (whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1))]
    assert not outside


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_names_itself_its_axes_with_units_and_its_lines(name: str) -> None:
    (axes,) = draw(example_profile(), name).axes
    assert axes.get_title(loc="left").endswith("\ntiny, bfloat16")
    units = ("tokens", "cos", "%", "nats", "of a block", "attention × residual")
    for label in (axes.get_xlabel(), axes.get_ylabel()):
        assert any(unit in label for unit in units), label
    assert len(axes.get_legend().get_texts()) >= 3


def legend(profile: Profile, name: str) -> str:
    (axes,) = draw(profile, name).axes
    return "\n".join(text.get_text() for text in axes.get_legend().get_texts())


def test_the_plots_show_what_the_profile_says() -> None:
    profile = example_profile()
    window = int(profile.length.model.windows(*profile.length.typical))
    assert f"fitted window: {window:,} tokens" in legend(profile, "drift")
    assert "values, layer 29" in legend(profile, "drift")
    assert "chosen: κ = 1.50%, blocks of 32" in legend(profile, "quality")
    stored = [each.risk >= 0.03 for each in profile.sensitivity]
    assert f"stored as 16 bits: {sum(stored) / len(stored):.0%} of these blocks" in legend(profile, "sensitivity")
    assert "nonlocal set H" in legend(profile, "attention")
    (axes,) = draw(profile, "attention").axes
    (markers,) = [line for line in axes.get_lines() if line.get_marker() == "v"]
    assert markers.get_xdata().tolist() == [(108 + 0.5) * 32, (112 + 0.5) * 32]


def test_every_plot_is_written_in_both_formats(tmp_path: Path) -> None:
    written = plot_profile(example_profile(), tmp_path / "new")
    assert [path.name for path in written] == [f"{name}.{kind}" for name in PLOTS for kind in ("png", "svg")]
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_the_same_profile_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (plot_profile(example_profile(), tmp_path / name, ["svg"]) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_plot_without_data_is_left_out(tmp_path: Path) -> None:
    bare = example_profile().model_copy(update={"attention": None, "candidates": (), "sensitivity": ()})
    assert [path.name for path in plot_profile(bare, tmp_path, ["png"])] == ["drift.png"]


def test_a_sparse_profile_is_drawn_as_well() -> None:
    profile = example_profile()
    assert profile.attention is not None
    zero = tuple(each.model_copy(update={"kl": 0.0, "risk": 0.0}) for each in profile.sensitivity[:1])
    sparse = profile.model_copy(
        update={
            "attention": profile.attention.model_copy(update={"dirty": (), "nonlocal_blocks": (), "edit": (5, 5)}),
            "sensitivity": zero,
            "candidates": profile.candidates[:1],
            "length": profile.length.model_copy(update={"coefficients": (0.0,) * 7}),
            "drift": profile.drift.model_copy(
                update={"edges": (0, 32), "rows": (1,), "value": ((0.0,) * 4,), "key": ((0.0,) * 4,)}
            ),
        }
    )
    for name in PLOTS:
        assert texts(draw(sparse, name))


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"formats \['pdf'\] are not allowed; take some of png, svg"):
        plot_profile(example_profile(), tmp_path, ["pdf"])


def test_without_matplotlib_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return known(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'agentcache-kv\[profile\]'"):
        plot_profile(example_profile(), tmp_path)
