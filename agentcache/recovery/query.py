"""The query: the end of a prompt, which asks what stands before it."""

from __future__ import annotations

from agentcache.recovery.base import PolicyContext
from agentcache.recovery.rows import QUERY_ROWS
from agentcache.types import BoundaryKind, Run

__all__ = ["MOST_QUERY_ROWS", "query_rows"]

MOST_QUERY_ROWS = 256
"""A last message of more rows is no question: its last `QUERY_ROWS` rows are the query then (**choice**)."""


def query_rows(context: PolicyContext) -> Run:
    """Returns the rows that ask: the last message with what follows it, at least the prompt's last `QUERY_ROWS` rows.

    A fresh query is never cached (EditLocal 5): policies that ask it recompute it. **choice**: papers give the query apart;
    here it is the last message, unless that is long.
    """
    end = context.diff.new_len
    tail = max(end - QUERY_ROWS, 0)
    last = max((b.start for b in context.boundaries if b.kind is BoundaryKind.MESSAGE), default=tail)
    return Run(min(last, tail) if end - last <= MOST_QUERY_ROWS else tail, end)
