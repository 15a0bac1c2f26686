"""The connector's worker half: follows the scheduler half's orders on this rank's pages. It decides nothing.

```
start_load   restore (copy, rotate keys, write pages) -> segment forward over X and R        inside the step
             background loads: one slice of their segment forward a step
finish_step  gather finished requests' rows into objects, a bounded number of rows a step
```

Nothing raises out of a step: rows that cannot be restored join the segment forward, and a load that fails altogether is
reported so that vLLM computes those rows itself.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch

from agentcache.config import ConnectorConfig
from agentcache.engine.online import OnlineRepair
from agentcache.engine.orders import Demoted, LoadOrder, LoadReport, Staged, StepOrders, StepReport
from agentcache.engine.runtime import Runtime
from agentcache.engine.saver import Saver
from agentcache.engine.segments import Segment
from agentcache.engine.timing import time_runtime
from agentcache.engine.worker_tier import WorkerTier
from agentcache.kernels import COMPARISON, Kernels, Tag
from agentcache.store.extents import LoadExtent
from agentcache.store.payloads import Payload, PayloadStore
from agentcache.types import Run, merge_runs, run_tokens

__all__ = ["WorkerHalf"]

logger = logging.getLogger(__name__)

_IDLE_S = 0.002  # a new request waits no longer than that for a step that only waits for the tier below
_NOTES = 4096  # reports kept for whoever asks later


@dataclass(slots=True)
class _Load:
    """A load in progress: what is still to compute, and what was done."""

    order: LoadOrder
    segments: deque[Segment]
    report: LoadReport = field(default_factory=LoadReport)
    repair: OnlineRepair | None = None


class WorkerHalf:
    """One rank's half.

    Args:
        config: The connector's settings.
        open_tier: Opens the tier below memory once the model is attached; None when there is none.
    """

    def __init__(
        self, config: ConnectorConfig, open_tier: Callable[[Callable[[Payload], bool]], WorkerTier] | None = None
    ) -> None:
        self.config = config
        self.tier: WorkerTier | None = None
        self._open_tier = open_tier
        self.store = PayloadStore(verify=config.verify_checksums)
        self.saver = Saver(config, self.store)
        self.runtime: Runtime | None = None
        self.notes: OrderedDict[tuple[str, str], dict[str, object]] = OrderedDict()
        self._background: OrderedDict[str, _Load] = OrderedDict()
        self._finished_loads: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._report = StepReport()
        self._index: dict[str, object] = {}
        self._tier_stats: dict[str, object] = {}
        self._counts = {"restores": 0, "restore_s": 0.0, "restored_bytes": 0, "lost_tokens": 0}

    def attach(self, runtime: Runtime) -> None:
        """Makes loads and saves possible; `runtime` has proved its claims.

        Raises:
            StoreError: The tier below memory cannot be opened.
        """
        if self._open_tier is not None and self.tier is None:
            self.tier = self._open_tier(partial(_is_sound, runtime.kernels))
        self.runtime = runtime
        if self.config.time_at_start:
            try:
                self._report.timings = time_runtime(runtime, self.config.precision)
            except Exception:
                logger.exception("agentcache could not time this engine; policy auto stays exact")

    # -- loads ---------------------------------------------------------------------------------------------------------

    def start_load(self, orders: StepOrders) -> None:
        """Restores and recomputes what this step's orders ask for."""
        if orders.clear:
            self._clear()
        for object_id in orders.drop:
            self.store.drop(object_id)
        for request_id in orders.cancel:
            if self._background.pop(request_id, None) is not None:
                self._finished_loads.add(request_id)
        if orders.index:
            self._index = orders.index
        if orders.tier:
            self._tier_stats = orders.tier
        self._start_transfers(orders)
        for key, note in orders.notes.items():
            self._note(key, note)
        now: list[_Load] = []
        for order in orders.loads:
            load = self._restore(order)
            if order.background:
                self._background[order.request_id] = load
            else:
                now.append(load)
        computed = self._recompute(now)
        if self._background:
            self._advance_background(self._slice_tokens(orders.scheduled_tokens + computed))

    def _start_transfers(self, orders: StepOrders) -> None:
        """Begins what goes to the tier below and comes from it; without one, nothing can."""
        if self.tier is None:
            self._report.demoted |= {order.ticket: Demoted(1, True) for order in orders.demote}
            lost = {order.number: frozenset(i for i, *_ in order.objects) for order in orders.stage}
            self._report.staged |= {number: Staged(1, objects) for number, objects in lost.items()}
            return
        for demotion in orders.demote:
            self.tier.demote(demotion, self.store)
        for staging in orders.stage:
            self.tier.stage(staging)

    def _restore(self, order: LoadOrder) -> _Load:
        """Copies an order's rows into its pages; rows that are lost join its recomputation."""
        assert self.runtime is not None
        started = time.perf_counter()
        blocks = torch.tensor(order.block_ids, dtype=torch.int64)
        extents, lost = self._fetch(order.extents)
        try:
            self.runtime.restore(self.store, extents, blocks)
            written = True
        except Exception:
            logger.exception("agentcache could not restore rows of request %s; they are recomputed", order.request_id)
            written = False
        if not self.runtime.all_ranks([written])[0]:
            extents, lost = [], order.extents
        recompute = merge_runs([*order.recompute, *(Run(e.position, e.position + e.length) for e in lost)])
        restored = sum(e.length for e in extents)
        report = LoadReport(
            restored_tokens=restored,
            restored_bytes=restored * self.runtime.row_bytes,
            lost_tokens=sum(e.length for e in lost),
            recomputed_tokens=run_tokens(recompute),
            restore_ms=(time.perf_counter() - started) * 1e3,
        )
        segments = deque(Segment(order.token_ids, blocks, a, b) for a, b in recompute)
        repair = None
        if order.online is not None:
            lost_runs = [Run(e.position, e.position + e.length) for e in lost]
            repair = OnlineRepair(self.runtime, order, blocks, lost_runs, report)
        return _Load(order, segments, report, repair)

    def _fetch(self, extents: list[LoadExtent]) -> tuple[list[LoadExtent], list[LoadExtent]]:
        """Returns the extents whose objects are there and intact, and the others, which are reported as lost."""
        assert self.runtime is not None
        objects = list(dict.fromkeys(extent.object_id for extent in extents))
        intact = [self.store.intact(object_id) for object_id in objects]
        good = dict(zip(objects, self.runtime.all_ranks(intact), strict=True))
        bad = {object_id for object_id, ok in good.items() if not ok}
        if bad:
            logger.warning("%d stored KV objects are lost or corrupt; their rows are recomputed", len(bad))
            for object_id in bad:
                self.store.drop(object_id)
            self._report.lost |= bad
        return [e for e in extents if good[e.object_id]], [e for e in extents if not good[e.object_id]]

    def _recompute(self, loads: list[_Load]) -> int:
        """Computes all rows of the step's loads in merged batches; returns how many there were."""
        if not loads:
            return 0
        assert self.runtime is not None
        try:
            # In scheduling order: a later load may read rows that an earlier one fills. Neighbours share their batches.
            for online, group in groupby(loads, key=lambda load: load.repair is not None):
                if online:
                    for load in group:
                        self._repair(load)
                else:
                    self._compute([*group])
        except Exception:
            logger.exception("agentcache could not recompute %d resumes of one step; vLLM computes them", len(loads))
            for load in loads:
                self._fail(load.order)
            return 0
        for load in loads:
            self._finish_load(load)
        return sum(load.report.recomputed_tokens for load in loads)

    def _compute(self, loads: list[_Load]) -> None:
        """Computes the rows of loads in merged batches."""
        assert self.runtime is not None
        started = time.perf_counter()
        self.runtime.segments.run(segment for load in loads for segment in load.segments)
        elapsed = (time.perf_counter() - started) * 1e3
        for load in loads:
            load.report.recompute_ms = elapsed if load.segments else 0.0

    def _repair(self, load: _Load) -> None:
        """Computes the rows of one load, those that its policy chooses here among them."""
        assert self.runtime is not None and load.repair is not None
        segments = load.repair.advance(load.segments)
        while segments:
            started = time.perf_counter()
            self.runtime.segments.run(segments)
            load.report.recompute_ms += (time.perf_counter() - started) * 1e3
            segments = load.repair.advance(())

    def _slice_tokens(self, scheduled: int) -> int:
        """Returns how many tokens background loads may compute in a step that computes `scheduled` others."""
        assert self.runtime is not None
        limit = self.config.recompute_tokens_per_step or self.runtime.segments.max_tokens
        return max(limit - scheduled, self.runtime.block_size)

    def _advance_background(self, budget: int) -> None:
        """Computes up to `budget` tokens of the background loads, oldest first."""
        assert self.runtime is not None
        for request_id, load in list(self._background.items()):
            part: list[Segment] = []
            while load.segments and budget > 0:
                segment = load.segments.popleft()
                if len(segment) > budget:
                    segment, rest = segment.split(budget)
                    load.segments.appendleft(rest)
                part.append(segment)
                budget -= len(segment)
            started = time.perf_counter()
            try:
                self.runtime.segments.run(part)
            except Exception:
                logger.exception("agentcache could not recompute request %s; vLLM computes it", request_id)
                del self._background[request_id]
                self._fail(load.order)
                continue
            load.report.recompute_ms += (time.perf_counter() - started) * 1e3
            if not load.segments and load.repair is not None:
                load.segments.extend(load.repair.advance(()))
            if not load.segments:
                del self._background[request_id]
                self._finished_loads.add(request_id)
                self._finish_load(load)
            if budget <= 0:
                break

    def _finish_load(self, load: _Load) -> None:
        report = load.report
        report.recomputed_tokens += run_tokens(report.repaired)
        self._counts["restores"] += 1
        self._counts["restore_s"] += report.restore_ms / 1e3
        self._counts["restored_bytes"] += report.restored_bytes
        self._counts["lost_tokens"] += report.lost_tokens
        self._report.loads[load.order.request_id] = report
        note = self.notes.get(load.order.key, {})
        self._note(
            load.order.key,
            note
            | {
                "restored_tokens": report.restored_tokens,
                "restored_bytes": report.restored_bytes,
                "recomputed_tokens": report.recomputed_tokens,
                "repaired_tokens": run_tokens(report.repaired),
                "repaired_rows": [list(run) for run in report.repaired],
                "fault": report.fault,
                "lost_tokens": report.lost_tokens,
                "restore_ms": report.restore_ms,
                "select_ms": report.select_ms,
                "recompute_ms": report.recompute_ms,
            },
        )

    def _fail(self, order: LoadOrder) -> None:
        """Gives the rows of a load back to vLLM: its blocks are invalid and the scheduler half evicts their hashes."""
        assert self.runtime is not None
        blocks = set(order.block_ids[order.start // self.runtime.block_size :])
        self._report.failed[order.request_id] = blocks
        self._invalid_blocks |= blocks
        if order.background:
            self._finished_loads.add(order.request_id)

    # -- saves ---------------------------------------------------------------------------------------------------------

    def finish_step(self, orders: StepOrders) -> None:
        """Gathers rows of finished requests: all that fits in the step's share."""
        self.saver.add(orders.saves)
        self.saver.advance(self.runtime, orders.scheduled_tokens, self._report, hurry=orders.hurry)
        if self.tier is not None:
            if not orders.scheduled_tokens and not self.saver.pending and not self._background:
                self.tier.wait(_IDLE_S)
            self.tier.collect(self.store, self._report)

    def _clear(self) -> None:
        self.store.clear()
        self.saver.clear(self._report)

    # -- what vLLM asks for after a step -------------------------------------------------------------------------------

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose saves and whose background loads ended since the last call."""
        loads, self._finished_loads = self._finished_loads, set()
        return self.saver.take_finished(), loads

    def take_invalid_blocks(self) -> set[int]:
        """Returns the blocks of failed loads since the last call."""
        out, self._invalid_blocks = self._invalid_blocks, set()
        return out

    def take_report(self) -> StepReport | None:
        """Returns what happened since the last call, or None when there is nothing to tell."""
        report, self._report = self._report, StepReport()
        return report if report.news else None

    def hint(self, namespace: str, version: str) -> None:
        """Notes that a version will be resumed soon: it is evicted last, and what memory lacks of it is fetched ahead."""
        self._report.hints.add((namespace, version))
        if self.tier is not None:
            self.tier.warm(namespace, version)

    def forget(self, namespace: str, versions: Iterable[str]) -> None:
        """Has the scheduler half drop versions with this rank's next report."""
        self._report.forget.update((namespace, version) for version in versions)

    def _note(self, key: tuple[str, str], note: dict[str, object]) -> None:
        self.notes[key] = self.notes.get(key, {}) | note
        self.notes.move_to_end(key)
        while len(self.notes) > _NOTES:
            self.notes.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        """Returns counters of this rank."""
        return {
            "attached": self.runtime is not None,
            "objects": len(self.store),
            "payload_bytes": self.store.size_bytes,
            "pending_saves": self.saver.pending,
            "background_loads": len(self._background),
            "tag_bytes": self.store.tag_bytes(),
            "counts": self._counts | self.saver.counts,
            "tier": None if self.tier is None else self._stats_of(self.tier),
            "index": dict(self._index),
        }

    def _stats_of(self, tier: WorkerTier) -> dict[str, Any]:
        """Returns what the two halves know of the tier below: this rank's handle, and the scheduler half's."""
        mine = {"pending": tier.pending, "tiers": [dict(stats) for stats in tier.stats]}
        return {"worker": mine, "scheduler": dict(self._tier_stats)}

    def close(self) -> None:
        """Ends the threads of the tier below."""
        if self.tier is not None:
            self.tier.close()
            self.tier = None


def _is_sound(kernels: Kernels, payload: Payload) -> bool:
    """Whether the bytes of a payload from below are as many as its rows take here."""
    own = [run for run in payload.runs if run.tag in [*Tag]]
    if any(run.tag not in COMPARISON for run in payload.runs if run not in own):
        return False
    return all(run.data.numel() == kernels.format(run.tag).run_bytes(run.tokens) for run in own)
