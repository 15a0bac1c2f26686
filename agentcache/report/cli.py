"""`agentcache report`: an event log as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["report"]


def report(
    events: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="The log that `AgentCache(events=...)` has written."),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", dir_okay=False, help="The page; a file that is there is replaced.")
    ] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Stands at the top; else the log's name.")] = None,
) -> None:
    """Write an event log as one HTML page: versions, what of each was reused, and what it saved.

    The page needs no network. With `AgentCache(events_text=True)` the log, and so the page, hold the text of prompts and replies.
    """
    from agentcache.report import build_report, read_log, render_page

    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    built = build_report(read_log(events))
    # Ids are whatever a framework had, and half of a surrogate pair is no text.
    out.write_text(render_page(built, title=title or events.name), encoding="utf-8", errors="replace")
    totals = built.totals
    Console().print(
        f"wrote {out}: {totals.versions:,} versions, {totals.saved_tokens:,} tokens reused behind an edit",
        highlight=False,
    )
