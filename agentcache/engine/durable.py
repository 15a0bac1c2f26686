"""The scheduler half's side of a durable tier: versions go down after their save, and come back when memory lacks them.

```
down   `demotions`
up     unknown parent -> find (thread) -> adopt -> StageOrder -> each rank fetches, compares checksums (its thread) -> committed
```

Nothing here blocks a step: threads talk to the disk or the server, and what they found is taken in by `poll`.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from agentcache.engine.demotions import Demotions
from agentcache.engine.orders import StageOrder, StepOrders, StepReport
from agentcache.store.index import Adopted, CheckpointIndex, Refusal, Version
from agentcache.store.tiers import KVStore, Manifest, Miss, Refused, StoreStats
from agentcache.store.tiers.background import Background
from agentcache.store.version import BlockObject

__all__ = ["DurableTier", "Seek"]

logger = logging.getLogger(__name__)

_MOST_JOBS = 1024
_POLL_S = 0.002  # a new request waits no longer than that for a step that only waits for a thread


@dataclass(slots=True)
class Seek:
    """A search for a version below memory.

    Attributes:
        reason: Why there is none, as the rest of a sentence that begins with its name; None while it is sought, or when it was
            found.
        version: The version, in state `saving` until its payloads are here.
    """

    reason: str | None = None
    version: Version | None = None

    @property
    def done(self) -> bool:
        """Whether it is known if there is one."""
        return self.reason is not None or self.version is not None


@dataclass(slots=True)
class _Staging:
    """Objects on their way up, and other such fetches whose objects the version shares."""

    version: Version
    keys: frozenset[str]
    after: set[int]
    ranks_left: int
    lost: set[int] = field(default_factory=set)


class DurableTier:
    """Moves versions between the checkpoint index and a store below it. All calls are the scheduler thread's.

    Args:
        store: Opened with this engine's fingerprint; closed with this.
        index: The versions in memory.
        fingerprint: Of this engine, see `engine.fingerprint`.
        ranks: Tensor-parallel ranks; each stores its part.
    """

    def __init__(self, store: KVStore, index: CheckpointIndex, fingerprint: Mapping[str, str], ranks: int) -> None:
        self.store = store
        self.index = index
        self.ranks = ranks
        self._up = Background("agentcache-find", _MOST_JOBS)
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._demotions = Demotions(store, index, fingerprint, ranks, self._tell)
        self._seeks: dict[tuple[str, str], Seek] = {}
        self._stagings: dict[int, _Staging] = {}
        self._next_staging = 0
        self._stage: list[StageOrder] = []
        self._news = False
        # As the threads saw it last: asking a store may take as long as a hung server's timeout.
        self._stats: tuple[StoreStats, ...] = ()

    def _tell(self, result: Callable[[], None]) -> None:
        """In a thread: hands a result to the scheduler's thread, and then looks at the counters."""
        self._results.put(result)
        stats = self.store.stats()  # the thread's log says so when a store cannot give them
        self._results.put(partial(self._note_stats, stats))

    def _note_stats(self, stats: tuple[StoreStats, ...]) -> None:
        if stats != self._stats:
            self._stats, self._news = stats, True

    def save(self, version: Version) -> None:
        """Queues a committed version to be stored below."""
        self._demotions.save(version)

    # -- up ------------------------------------------------------------------------------------------------------------

    def seek(self, namespace: str, version: str) -> Seek:
        """Returns the search for a version that is not in memory; one search serves all that ask meanwhile."""
        key = (namespace, version)
        if key not in self._seeks:
            seek = self._seeks[key] = Seek()
            if not self._up.submit(partial(self._find, key)):
                seek.reason = "is not in memory, and too many searches of the store are open"
                del self._seeks[key]
            return seek
        return self._seeks[key]

    def _find(self, key: tuple[str, str]) -> None:
        """In the thread: reads the manifest."""
        found: Manifest | Miss | Refused
        try:
            found = self.store.find(*key)
        except Exception as error:
            logger.exception("version %s could not be sought in the store", key[1])
            found = Refused(f"{type(error).__name__}: {error}", "unavailable")
        self._tell(partial(self._found, key, found))

    def _found(self, key: tuple[str, str], found: Manifest | Miss | Refused) -> None:
        seek = self._seeks.pop(key)
        self._news = True
        if isinstance(found, Miss):
            seek.reason = "is unknown or was evicted"
        elif isinstance(found, Refused):
            seek.reason = f"cannot be restored: {found.reason}"
        elif (here := self.index.lookup(*key)) is not None:
            seek.version = here
        elif found.ranks != self.ranks:
            seek.reason = f"was stored by {found.ranks} ranks; this engine has {self.ranks}"
        else:
            made = self._adopt(found)
            if isinstance(made, Refusal):
                seek.reason = f"cannot be restored: {made.reason}"
            else:
                seek.version = made.version

    def _adopt(self, manifest: Manifest) -> Adopted | Refusal:
        attention = manifest.attention_codes
        version = Version(
            version_id=manifest.version,
            namespace=manifest.namespace,
            group=manifest.group,
            parent=manifest.parent,
            token_ids=manifest.token_ids,
            exact_end=manifest.exact_end,
            salts=tuple((index, bytes.fromhex(salt)) for index, salt in manifest.salts),
            extents=(),
            attention=None if attention is None else np.frombuffer(attention, dtype=np.uint8),
        )
        blocks = [
            BlockObject(
                object_id=0,
                key=entry.key,
                tokens=entry.tokens,
                source_position=entry.source_position,
                size_bytes=entry.size_bytes,
                exact=entry.exact,
                lossless=entry.tag == "exact",
                tag=entry.tag,
                parts=entry.parts,
            )
            for entry in manifest.objects
        ]
        made = self.index.adopt(version, manifest.extents, blocks)
        if isinstance(made, Adopted):
            keys = {block.key for block in blocks}
            number = self._next_staging
            self._next_staging += 1
            self._stagings[number] = _Staging(
                version,
                keys=frozenset(key for _, key in made.new),
                after={other for other, staging in self._stagings.items() if not keys.isdisjoint(staging.keys)},
                ranks_left=self.ranks if made.new else 0,
            )
            if made.new:
                found = {block.object_id: block for block in blocks}
                objects = [(i, key, found[i].tokens, found[i].tag) for i, key in made.new]
                self._stage.append(StageOrder(number, objects))
            self._commit_staged()
        return made

    def _commit_staged(self) -> None:
        """Commits the versions whose payloads are all here; fetches only wait for earlier ones."""
        for number, staging in list(self._stagings.items()):
            if not staging.ranks_left and staging.after.isdisjoint(self._stagings):
                del self._stagings[number]
                if staging.lost:  # only now: no rank can still be fetching what is dropped
                    logger.warning("%d stored KV objects are lost; their rows are recomputed", len(staging.lost))
                    self.index.lose_objects(staging.lost)
                self.index.commit(staging.version)

    # -- a step --------------------------------------------------------------------------------------------------------

    def poll(self, *, idle: bool) -> None:
        """Takes in what the threads have done; when nothing else is to do, waits a moment for it."""
        wait = idle and (self._seeks or self._demotions.in_thread)
        try:
            self._results.get(timeout=_POLL_S)() if wait else self._results.get_nowait()()
            while True:
                self._results.get_nowait()()
        except queue.Empty:
            pass
        self._demotions.start()

    def take_orders(self, orders: StepOrders) -> None:
        """Moves the orders that are due into a step's."""
        orders.demote, orders.stage = self._demotions.take_orders(), self._stage
        self._stage = []

    def on_report(self, report: StepReport) -> None:
        """Takes in what the ranks stored and fetched."""
        for ticket, part in report.demoted.items():
            self._demotions.on_report(ticket, part)
        for number, staged in report.staged.items():
            staging = self._stagings[number]
            staging.ranks_left -= staged.ranks
            staging.lost |= staged.lost
        self._commit_staged()

    @property
    def open_saves(self) -> int:
        """How many versions are on their way down."""
        return self._demotions.open

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping for this."""
        return bool(self.open_saves or self._demotions.news or self._seeks or self._stagings or self._news)

    def take_stats(self) -> dict[str, Any] | None:
        """Returns the counters, when they have changed since they were taken last."""
        if not (self._news or self._demotions.news):
            return None
        self._news = self._demotions.news = False
        return {
            "open_saves": self.open_saves,
            "owed": self._demotions.owed,
            "tiers": [dict(stats) for stats in self._stats],
        }

    def close(self) -> None:
        """Ends the threads after what they have queued, and the store."""
        self._up.close()
        self._demotions.close()
        self.store.close()
