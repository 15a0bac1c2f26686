"""`ResumeTable`: each resume of a running cache and what it saved, for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console
from rich.table import Table

from agentcache.events import Event
from agentcache.report.log import entries_of
from agentcache.report.model import Row, Totals, build_report

if TYPE_CHECKING:
    from agentcache.cache import AgentCache
    from agentcache.engine.embedded import AsyncAgentCache

__all__ = ["ResumeTable"]

_LONGEST = 28  # characters of an episode's id that are shown


class ResumeTable:
    """Follows a cache and prints its versions as a table: why each differs, and how its KV came to be.

    ```python
    with AgentCache("smollm2", policy="edit_local") as cache, ResumeTable(cache) as resumes:
        ...
        resumes.show()
    ```

    `saved` are the tokens that vLLM's prefix cache would have computed, and their share of them.

    Args:
        cache: Is followed from now on, until `close` or the end of the `with` block.
        title: Above the table.
    """

    def __init__(self, cache: AgentCache | AsyncAgentCache, title: str = "") -> None:
        self.title = title
        self._events: list[Event] = []
        self._lock = Lock()
        self._unsubscribe: Callable[[], None] | None = cache.subscribe(self._take)

    def _take(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    @property
    def rows(self) -> list[Row]:
        """The versions so far, in the order in which they were recorded."""
        with self._lock:
            events = list(self._events)
        rows = [row for family in build_report(entries_of(events)).families for row in family.rows]
        return sorted(rows, key=lambda row: row.number)

    @property
    def totals(self) -> Totals:
        """Sums over them."""
        with self._lock:
            events = list(self._events)
        return build_report(entries_of(events)).totals

    def show(self, console: Console | None = None) -> None:
        """Prints the table of what has happened so far."""
        (console or Console()).print(self)

    def __rich__(self) -> Table:
        table = Table(title=self.title or None, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("episode", no_wrap=True)
        table.add_column("revision", no_wrap=True)
        for name in ("prompt", "P", "X", "R", "F", "N", "TTFT", "saved"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            revised = row.entry.revised
            counts = (str(row.counts.get(label, 0)) for label in "PXRFN")
            ttft = f"{row.ttft_ms:.0f} ms" if row.ttft_ms else "–"
            episode = revised.episode if len(revised.episode) <= _LONGEST else f"…{revised.episode[1 - _LONGEST :]}"
            table.add_row(episode, str(revised.kind.value), str(revised.new_len), *counts, ttft, _saved(row))
        totals = self.totals
        table.add_section()
        table.add_row(
            f"{totals.resumes} resume{'s' * (totals.resumes != 1)}",
            "",
            str(totals.prompt_tokens),
            *[""] * 5,
            f"{totals.ttft_ms:.0f} ms",
            f"{totals.saved_tokens} ({totals.saved_share:.0%})" if totals.saved_tokens else "–",
        )
        return table

    def close(self) -> None:
        """Stops following the cache. Idempotent."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _saved(row: Row) -> str:
    if not row.saved_tokens:
        return "–"
    computed = row.counts.get("X", 0) + row.counts.get("R", 0) + row.counts.get("N", 0)
    return f"{row.saved_tokens} ({row.saved_tokens / (row.saved_tokens + computed):.0%})"
