"""From a policy's choice to the plan of one resume: pure, and over runs instead of tokens, hence cheap."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from operator import index

from agentcache.recovery.base import PolicyContext, RecoveryPlan, RecoveryPolicy
from agentcache.types import AlignedRun, PromptDiff, Run, clip_runs, complement, merge_runs, run_tokens

__all__ = ["plan"]


def plan(
    policy: RecoveryPolicy,
    context: PolicyContext,
    *,
    parent_exact_end: int,
    missing: Iterable[tuple[int, int]] = (),
    limit: int,
) -> RecoveryPlan:
    """Returns what to restore and what to recompute so that rows `[0, load_end)` of the new prompt are there.

    ```
    rows of the new prompt   P restored | P lost | X | S selected or lost | S restored | ... | S restored | the engine's
    restore                  ==========                                     ==========         ==========
    recompute                           ------------------------------------            -----
    counted as               prefix      repair  fresh        repair          reused           reused   ^ load_end
    ```

    An exact policy restores only exact rows of P, up to the first lost one. A lossy one ends at its last restored row:
    the engine computes what follows anyway, in its own scheduling, so recomputing it here gains nothing. A lossy policy
    that leaves nothing to restore after the edit thus gives a plain prefix.

    Exactness: a recomputed row is exact when every row before it is, a restored row only inside P and below
    `parent_exact_end`. Hence the first approximate row is the first restored one beyond those, and every row after it
    is approximate; a run that is recomputed right behind exact rows stays exact (contiguity buys exactness).

    The four counts are rows of `[0, load_end)` and sum to `load_end`: `prefix_tokens` restored rows of P (the parent's
    approximate ones too), `fresh_tokens` rows that no aligned run covers, `repair_tokens` aligned rows that are
    recomputed (selected, or lost, in P too), `reused_tokens` restored rows outside P.

    Args:
        policy: Chooses R.
        context: The diff to the parent, the new prompt and its boundaries.
        parent_exact_end: How many leading rows of the parent are those of a full prefill.
        missing: Runs of parent positions without stored KV.
        limit: Most rows that may be loaded; the prompt's length minus one, since the engine computes the last token.
    """
    assert limit >= 0, f"limit is a number of rows, got {limit}"
    diff = context.diff
    lost = merge_runs(missing)
    suffix = sum(run.length for run in diff.suffix)
    restore: tuple[AlignedRun, ...]
    if policy.exact:
        planned = suffix
        end = min(diff.prefix, parent_exact_end, limit, *(run.start for run in lost[:1]))
        restore = (AlignedRun(0, 0, end),) if end > 0 else ()
    else:
        selected = merge_runs((index(start), index(stop)) for start, stop in policy.select(context))
        in_suffix = (part for run in diff.suffix for part in clip_runs(selected, run.new_start, run.new_stop))
        planned = policy.planned_tokens(context, run_tokens(in_suffix))
        restore = tuple(_restorable(diff, selected, lost, limit))
    load_end = restore[-1].new_stop if restore else 0
    recompute = complement(((run.new_start, run.new_stop) for run in restore), load_end)

    exact_end = min(diff.prefix, parent_exact_end)
    first_approximate = next((max(run.new_start, exact_end) for run in restore if run.new_stop > exact_end), None)
    prefix = sum(run.length for run in restore if run.new_start < diff.prefix)
    reused = sum(run.length for run in restore) - prefix
    fresh = run_tokens(clip_runs(diff.fresh, 0, load_end))
    return RecoveryPlan(
        policy=policy.name,
        exact=first_approximate is None,
        load_end=load_end,
        restore=restore,
        recompute=recompute,
        first_approximate=first_approximate,
        prefix_tokens=prefix,
        fresh_tokens=fresh,
        repair_tokens=load_end - prefix - fresh - reused,
        reused_tokens=reused,
        suffix_tokens=suffix,
        planned_tokens=planned,
        digest=_digest(policy, restore, recompute, load_end),
    )


def _restorable(diff: PromptDiff, selected: Sequence[Run], lost: Sequence[Run], limit: int) -> Iterator[AlignedRun]:
    """Yields the aligned rows below `limit` that are neither selected (new positions) nor lost (old positions)."""
    for at, run in enumerate(diff.aligned):
        if run.new_start >= limit:
            return
        in_prefix = at == 0 and diff.prefix > 0
        blocked = [] if in_prefix else _overlapping(selected, run.new_start, run.new_stop)
        blocked += [Run(a + run.shift, b + run.shift) for a, b in _overlapping(lost, run.old_start, run.old_stop)]
        for start, stop in complement(blocked, min(run.new_stop, limit), run.new_start):
            yield AlignedRun(start - run.shift, start, stop - start)


def _overlapping(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Returns those of ascending disjoint runs that reach into `[start, stop)`, uncut."""
    first = bisect_right(runs, start, key=lambda run: run.stop)
    last = first
    while last < len(runs) and runs[last].start < stop:
        last += 1
    return list(runs[first:last])


def _digest(policy: RecoveryPolicy, restore: Sequence[AlignedRun], recompute: Sequence[Run], load_end: int) -> str:
    """Returns 32 hex digits that name the plan."""
    options = asdict(policy)  # type: ignore[call-overload]
    text = json.dumps([policy.name, options, restore, recompute, load_end], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
