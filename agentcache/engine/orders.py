"""What the connector's two halves tell each other once an engine step. Plain data, no torch.

```
scheduler half --StepOrders--> worker half (every rank)      what to restore, recompute, gather and drop
scheduler half <--StepReport-- worker half (aggregated)      what was done, what was lost
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from agentcache.store.extents import LoadExtent, NewObject
from agentcache.types import Run

__all__ = ["LoadOrder", "LoadReport", "SaveOrder", "StepOrders", "StepReport", "Stored"]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Restores and recomputes the rows of one request.

    Attributes:
        request_id: vLLM's id.
        key: `(namespace, version)` under which the report is kept.
        token_ids: Ids of rows `[0, load_end)`.
        block_ids: The request's block table.
        start: First row that is ours; rows before it are vLLM's own hit.
        extents: Rows to copy.
        recompute: Rows to compute, ascending and disjoint.
        background: Whether the recomputation may spread over several steps (the request waits for it).
    """

    request_id: str
    key: tuple[str, str]
    token_ids: list[int]
    block_ids: list[int]
    start: int
    extents: list[LoadExtent]
    recompute: list[Run]
    background: bool


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Gathers rows of a finished request's blocks into new objects."""

    request_id: str
    block_ids: list[int]
    objects: list[NewObject]


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    """All orders of one step.

    Attributes:
        loads: In scheduling order: a later request may read blocks that an earlier one fills.
        saves: New gathers.
        drop: Objects that nothing refers to any more.
        cancel: Requests whose background load is no longer wanted.
        notes: `(namespace, version)` to the JSON report so far, kept for whoever asks the worker.
        scheduled_tokens: What vLLM itself computes in this step.
        clear: Whether to drop every object first.
        index: The checkpoint index's counters when they changed, for whoever asks the worker.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    notes: dict[tuple[str, str], dict[str, object]] = field(default_factory=dict)
    scheduled_tokens: int = 0
    clear: bool = False
    index: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class LoadReport:
    """What one load did on one rank."""

    restored_tokens: int = 0
    restored_bytes: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    restore_ms: float = 0.0
    recompute_ms: float = 0.0

    def worst(self, other: LoadReport) -> LoadReport:
        """Returns the slower of two ranks' reports: sums of bytes, maxima of the rest."""
        return LoadReport(
            max(self.restored_tokens, other.restored_tokens),
            self.restored_bytes + other.restored_bytes,
            max(self.recomputed_tokens, other.recomputed_tokens),
            max(self.lost_tokens, other.lost_tokens),
            max(self.restore_ms, other.restore_ms),
            max(self.recompute_ms, other.recompute_ms),
        )


class Stored(NamedTuple):
    """What became of a new object: its payload's bytes over all ranks, and whether it holds the rows bit by bit."""

    size_bytes: int
    lossless: bool


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What one step did, over all ranks after aggregation.

    Attributes:
        loads: By request id.
        saved: Requests whose objects are stored.
        stored: Those objects.
        unsaved: Requests whose gather failed.
        lost: Objects that are absent or whose checksum does not match.
        failed: Requests whose load raised, and their blocks that are not to be trusted.
    """

    loads: dict[str, LoadReport] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    stored: dict[int, Stored] = field(default_factory=dict)
    unsaved: set[str] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    failed: dict[str, set[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Returns the reports of two ranks as one."""
        assert isinstance(other, StepReport)
        loads = dict(self.loads)
        for request_id, report in other.loads.items():
            loads[request_id] = loads[request_id].worst(report) if request_id in loads else report
        stored = dict(self.stored)
        for object_id, (size, lossless) in other.stored.items():
            mine = stored.get(object_id, Stored(0, True))
            stored[object_id] = Stored(mine.size_bytes + size, mine.lossless and lossless)
        return StepReport(
            loads=loads,
            saved=self.saved & other.saved,
            stored=stored,
            unsaved=self.unsaved | other.unsaved,
            lost=self.lost | other.lost,
            failed={r: self.failed.get(r, set()) | other.failed.get(r, set()) for r in {*self.failed, *other.failed}},
        )
