"""What the connector's two halves tell each other once an engine step. Plain data, no torch.

```
scheduler half --StepOrders--> worker half (every rank)      what to restore, recompute, gather and drop
scheduler half <--StepReport-- worker half (aggregated)      what was done, what was lost
```
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from agentcache.engine.costs import Sample
from agentcache.engine.planning import OnlineOrder
from agentcache.store.extents import LoadExtent, NewObject
from agentcache.types import Run

__all__ = [
    "DemoteOrder",
    "Demoted",
    "LoadOrder",
    "LoadReport",
    "SaveOrder",
    "StageOrder",
    "Staged",
    "StepOrders",
    "StepReport",
    "Stored",
]


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
        online: How further rows are chosen, when the policy does that.
    """

    request_id: str
    key: tuple[str, str]
    token_ids: list[int]
    block_ids: list[int]
    start: int
    extents: list[LoadExtent]
    recompute: list[Run]
    background: bool
    online: OnlineOrder | None = None


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Gathers rows of a finished request's blocks into new objects.

    Attributes:
        request_id: vLLM's id.
        block_ids: The request's block table.
        objects: What to gather.
        precision: How, see `ConnectorConfig.precision`.
        token_ids: Ids of all rows that have KV.
        prompt_tokens: How many of them are the prompt.
        attention: Whether to measure how much each row is attended to, whatever the precision.
    """

    request_id: str
    block_ids: list[int]
    objects: list[NewObject]
    precision: str
    token_ids: list[int]
    prompt_tokens: int
    attention: bool = False


@dataclass(frozen=True, slots=True)
class DemoteOrder:
    """Stores objects in the tier below: `(object id, key)`, each rank its part, under the ticket of an open save."""

    ticket: str
    objects: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Fetches objects from the tier below: `(object id, key, rows, tag)`."""

    number: int
    objects: list[tuple[int, str, int, str]]


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    """All orders of one step.

    Attributes:
        loads: In scheduling order: a later request may read blocks that an earlier one fills.
        saves: New gathers.
        demote: Objects to store below.
        stage: Objects to fetch from below.
        drop: Objects that nothing refers to any more.
        cancel: Requests whose background load is no longer wanted.
        notes: `(namespace, version)` to the JSON report so far, kept for whoever asks the worker.
        scheduled_tokens: What vLLM itself computes in this step.
        hurry: Whether a request waits for an open save.
        clear: Whether to drop every object first.
        index: The checkpoint index's counters when they changed, for whoever asks the worker.
        tier: The same of the scheduler half's handle of the durable tier.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    demote: list[DemoteOrder] = field(default_factory=list)
    stage: list[StageOrder] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    notes: dict[tuple[str, str], dict[str, object]] = field(default_factory=dict)
    scheduled_tokens: int = 0
    hurry: bool = False
    clear: bool = False
    index: dict[str, object] = field(default_factory=dict)
    tier: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class LoadReport:
    """What one load did on one rank.

    `repaired` are the rows that were chosen in the worker, where the ranks choose the same; `fault` says why none could be.
    """

    restored_tokens: int = 0
    restored_bytes: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    restore_ms: float = 0.0
    recompute_ms: float = 0.0
    select_ms: float = 0.0
    repaired: tuple[Run, ...] = ()
    fault: str | None = None

    def worst(self, other: LoadReport) -> LoadReport:
        """Returns the slower of two ranks' reports: sums of bytes, maxima of the rest."""
        return LoadReport(
            max(self.restored_tokens, other.restored_tokens),
            self.restored_bytes + other.restored_bytes,
            max(self.recomputed_tokens, other.recomputed_tokens),
            max(self.lost_tokens, other.lost_tokens),
            max(self.restore_ms, other.restore_ms),
            max(self.recompute_ms, other.recompute_ms),
            max(self.select_ms, other.select_ms),
            self.repaired,
            self.fault or other.fault,
        )


class Stored(NamedTuple):
    """What became of a new object: its payload's bytes over all ranks, its precision, and whether it holds the rows bit by bit."""

    size_bytes: int
    tag: str
    lossless: bool


class Demoted(NamedTuple):
    """How many ranks are done with an order to store below, and whether one of them failed."""

    ranks: int
    failed: bool


class Staged(NamedTuple):
    """How many ranks are done with an order to fetch from below, and the objects that one of them could not have."""

    ranks: int
    lost: frozenset[int]


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What one step did, over all ranks after aggregation.

    Attributes:
        loads: By request id.
        saved: Requests whose objects are stored.
        stored: Those objects.
        unsaved: Requests whose gather failed.
        attention: By request that was saved: how much each row was attended to, `[T]` codes of `store.scores`; where that
            was measured. The ranks agree on it.
        lost: Objects that are absent or whose checksum does not match.
        failed: Requests whose load raised, and their blocks that are not to be trusted.
        demoted: By ticket. Ranks end in different steps.
        staged: By the order's number. The same.
        hints: `(namespace, version)` that will be resumed soon: they are evicted last.
        forget: `(namespace, version)` that nobody shall find any more.
        timings: Once, what was timed at start-up; the ranks time the same pieces, and the slowest of them counts.
    """

    loads: dict[str, LoadReport] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    stored: dict[int, Stored] = field(default_factory=dict)
    unsaved: set[str] = field(default_factory=set)
    attention: dict[str, bytes] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    failed: dict[str, set[int]] = field(default_factory=dict)
    demoted: dict[str, Demoted] = field(default_factory=dict)
    staged: dict[int, Staged] = field(default_factory=dict)
    hints: set[tuple[str, str]] = field(default_factory=set)
    forget: set[tuple[str, str]] = field(default_factory=set)
    timings: list[Sample] = field(default_factory=list)

    @property
    def news(self) -> bool:
        """Whether there is anything to tell."""
        return any(bool(getattr(self, each.name)) for each in fields(self))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Returns the reports of two ranks as one."""
        assert isinstance(other, StepReport)
        loads = dict(self.loads)
        for request_id, report in other.loads.items():
            loads[request_id] = loads[request_id].worst(report) if request_id in loads else report
        stored = dict(self.stored)
        for object_id, more in other.stored.items():
            mine = stored.get(object_id, Stored(0, more.tag, True))
            tag = more.tag if more.tag == mine.tag else "mixed"
            stored[object_id] = Stored(mine.size_bytes + more.size_bytes, tag, mine.lossless and more.lossless)
        demoted, staged = dict(self.demoted), dict(self.staged)
        for ticket, part in other.demoted.items():
            ranks, failed = demoted.get(ticket, Demoted(0, False))
            demoted[ticket] = Demoted(ranks + part.ranks, failed or part.failed)
        for number, found in other.staged.items():
            ranks, lost = staged.get(number, Staged(0, frozenset()))
            staged[number] = Staged(ranks + found.ranks, lost | found.lost)
        return StepReport(
            loads=loads,
            saved=self.saved & other.saved,
            stored=stored,
            unsaved=self.unsaved | other.unsaved,
            attention=other.attention | self.attention,
            lost=self.lost | other.lost,
            failed={r: self.failed.get(r, set()) | other.failed.get(r, set()) for r in {*self.failed, *other.failed}},
            demoted=demoted,
            staged=staged,
            hints=self.hints | other.hints,
            forget=self.forget | other.forget,
            timings=_slower(self.timings, other.timings),
        )


def _slower(mine: list[Sample], theirs: list[Sample]) -> list[Sample]:
    """Returns the slower of each two timings of one piece; those of one rank when the other has none."""
    pairs = zip(mine, theirs, strict=False)
    return [max(pair, key=lambda sample: sample.seconds) for pair in pairs] or mine or theirs
