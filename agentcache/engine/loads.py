"""From a request's plan to its load: what to copy and what to compute, given what the index has now. Pure: no vLLM, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from agentcache.engine.planning import OnlineOrder, Planned
from agentcache.engine.state import Load, RequestState
from agentcache.recovery.rows import QUERY_ROWS
from agentcache.store.extents import LoadExtent
from agentcache.store.index import CheckpointIndex
from agentcache.types import Run, clip_runs, complement, merge_runs

__all__ = ["online_order", "plan_load"]


def plan_load(index: CheckpointIndex, state: RequestState, start: int, *, background: bool = False) -> Load:
    """Returns the load of rows `[start, load_end)`; rows whose objects are gone are computed.

    Args:
        index: Holds the parent's objects.
        state: A request with a plan.
        start: vLLM's own hit.
        background: Whether the load spreads over steps of its own.
    """
    plan, parent = state.plan, state.parent
    assert plan is not None and parent is not None
    extents = list(_kept(index, index.load_plan(parent, plan.restore, start), state.exact_end))
    copied = [Run(e.position, e.position + e.length) for e in extents]
    return Load(start, extents, complement(copied, plan.load_end, start), background)


def _kept(index: CheckpointIndex, extents: Iterable[LoadExtent], exact_end: int) -> Iterator[LoadExtent]:
    """Yields extents without rows that were promised to be exact, from vLLM's cache, and are stored otherwise.

    They are needed only when vLLM evicted them since, and are then computed.
    """
    for extent in extents:
        exact = index.trusted(extent.object_id) and not extent.shift
        skip = 0 if exact else min(max(exact_end - extent.position, 0), extent.length)
        if skip < extent.length:
            object_id, offset, length, position, shift = extent
            yield LoadExtent(object_id, offset + skip, length - skip, position + skip, shift)


def online_order(planned: Planned, load: Load, prompt: Sequence[int]) -> OnlineOrder:
    """Returns what the worker needs to choose further rows of a load.

    Args:
        planned: With an online policy.
        load: What is copied and computed in any case.
        prompt: The prompt's ids.
    """
    plan, policy, context = planned.plan, planned.policy, planned.context
    assert plan is not None and policy is not None and context is not None
    copied = merge_runs((e.position, e.position + e.length) for e in load.extents)
    rows = clip_runs(copied, max(load.start, context.diff.prefix), plan.load_end)
    query = prompt[max(plan.load_end, len(prompt) - QUERY_ROWS) :]
    return OnlineOrder(policy, context, tuple(rows), tuple(query))
