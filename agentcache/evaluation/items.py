"""The one loop that measures: item by item, each kept on the disk as soon as it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentcache.work_file import WorkFile, digest_key

__all__ = ["Row", "item_key", "rotated", "run_items"]

T = TypeVar("T")

Row = dict[str, Any]
"""What one item showed, as JSON has it."""

_TOLD = 10  # items between two lines where no bar can be shown


def item_key(**parts: Any) -> str:
    """Returns 32 hex digits that name an item's measurement.

    Args:
        **parts: All that the result depends on, JSON values: the weights' digest, the data's hash, the item, its arms and their
            options, and a number that changes when the measurement's code does.
    """
    return digest_key(parts)


def rotated(arms: Sequence[T], by: int) -> list[T]:
    """Returns the arms in their order, beginning with another one for each `by`: none always runs first."""
    at = by % len(arms) if arms else 0
    return [*arms[at:], *arms[:at]]


def run_items(
    items: Sequence[tuple[str, T]],
    measure: Callable[[T], Row],
    *,
    work: WorkFile,
    label: str,
    console: Console,
    enough: Callable[[list[Row]], bool] | None = None,
) -> list[Row]:
    """Returns what each item showed, in their order; an item that the work file has is not measured again.

    An interrupt says how to go on and is raised again; all items that were measured are kept.

    Args:
        items: Each with its `item_key`.
        measure: Returns what an item shows.
        work: Where it is kept.
        label: Of the progress.
        console: Where the progress is shown.
        enough: Whether the rows so far suffice; the items after them are left out.
    """
    rows: list[Row] = []
    started, measured = time.monotonic(), 0
    try:
        with _progress(console) as progress:
            task = progress.add_task(label, total=len(items))
            for key, item in items:
                if enough is not None and enough(rows):
                    break
                known = work.get(key)
                if known is None:
                    known = work.put(key, measure(item), name=label)
                    measured += 1
                rows.append(dict(known))
                progress.advance(task)
                if not console.is_terminal and (measured in (1, 3) or len(rows) % _TOLD == 0):
                    console.print(_line(label, len(rows), len(items), measured, time.monotonic() - started))
            progress.update(task, total=len(rows))
    except KeyboardInterrupt:
        console.print(f"{label}: interrupted after {len(rows)} of {len(items)} items; the same command goes on there")
        raise
    return rows


def _line(label: str, done: int, total: int, measured: int, seconds: float) -> str:
    """Returns one line of progress."""
    if not measured or done == total:
        return f"{label}: {done} of {total} items"
    each = seconds / measured
    return f"{label}: {done} of {total} items, {each:.1f} s each, {each * (total - done) / 60:.0f} min left at most"


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
