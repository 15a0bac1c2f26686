"""The scheduler half's side of a durable tier: versions go down after their save, and come back when memory lacks them.

```
down   committed in memory -> prepare (thread) -> DemoteOrder -> each rank puts (its thread) -> complete (thread)
up     unknown parent -> find (thread) -> adopt -> StageOrder -> each rank fetches, compares checksums (its thread) -> committed
```

Nothing here blocks a step: threads talk to the disk or the server, and what they found is taken in by `poll`. A version that
goes down is pinned in memory until then; one that the tier refuses stays in memory, and is offered again after the next that
it took.
"""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from agentcache.engine.orders import DemoteOrder, StageOrder, StepOrders, StepReport
from agentcache.store.index import Adopted, CheckpointIndex, Refusal, Version
from agentcache.store.tiers import KVStore, Manifest, Miss, ObjectEntry, Refused, StoredExtent, StoreStats
from agentcache.store.tiers.background import Background
from agentcache.store.version import BlockObject

__all__ = ["DurableTier", "Seek"]

logger = logging.getLogger(__name__)

_OPEN = 2  # demotions at a time: one is prepared while the ranks store another
_MOST_JOBS = 1024
_MOST_OWED = 256
_HEAD_BYTES = 1024  # more than the head and the run table of one rank's payload take
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
class _Demotion:
    version: Version
    keys: frozenset[str]
    new: frozenset[str] = frozenset()
    ticket: str = ""
    done: int = 0
    failed: bool = False


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
        self.fingerprint = dict(fingerprint)
        self.ranks = ranks
        self._up = Background("agentcache-find", _MOST_JOBS)
        self._down = Background("agentcache-demote", _MOST_JOBS, yields=True)
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Version] = deque()
        self._owed: OrderedDict[tuple[str, str], Version] = OrderedDict()
        # Objects that open saves put below; the thread's alone, which opens and seals them.
        self._storing: set[str] = set()
        # Objects that open demotions store: what shares them waits, and then shares them below too.
        self._going: set[str] = set()
        self._preparing = 0
        self._demotions: dict[str, _Demotion] = {}
        self._completing = 0
        self._seeks: dict[tuple[str, str], Seek] = {}
        self._stagings: dict[int, _Staging] = {}
        self._next_staging = 0
        self._orders = StepOrders()
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

    # -- down ----------------------------------------------------------------------------------------------------------

    def save(self, version: Version) -> None:
        """Queues a committed version to be stored below."""
        self._waiting.append(version)
        self._news = True
        self._start_demotions()

    def _start_demotions(self) -> None:
        while self._waiting and self._preparing + len(self._demotions) + self._completing < _OPEN:
            version = self._waiting[0]
            blocks = self.index.objects_of(version) if version.state == "committed" else []
            going = frozenset(block.key for block in blocks if not block.parts)
            if not going.isdisjoint(self._going):
                return
            self._waiting.popleft()
            if version.state != "committed":
                continue  # evicted from memory before its turn came
            # Made in the thread: it packs all token ids, and checks what it is given.
            draft = self._draft(version, blocks)
            sizes = {block.key: block.size_bytes + self.ranks * _HEAD_BYTES for block in blocks}
            ids = {block.key: block.object_id for block in blocks}
            self.index.pin(version)
            self._going |= going
            self._preparing += 1
            if not self._down.submit(partial(self._prepare, _Demotion(version, going), draft, sizes, ids)):
                self._preparing -= 1
                self._not_stored(_Demotion(version, going), Refused("too many saves wait for the store", "unavailable"))

    def _draft(self, version: Version, blocks: list[BlockObject]) -> Callable[[], Manifest]:
        keys = {block.object_id: block.key for block in blocks}
        return partial(
            Manifest.draft,
            fingerprint=self.fingerprint,
            namespace=version.namespace,
            version=version.version_id,
            token_ids=version.token_ids,
            extents=[StoredExtent(keys[e.object_id], *e[1:]) for e in version.extents],
            objects=[ObjectEntry(b.key, b.tokens, b.source_position, b.exact, b.tag, b.parts) for b in blocks],
            group=version.group,
            parent=version.parent,
            exact_end=version.exact_end,
            salts=version.salts,
            ranks=self.ranks,
            attention=version.attention,
        )

    def _prepare(
        self, demotion: _Demotion, make: Callable[[], Manifest], sizes: dict[str, int], ids: dict[str, int]
    ) -> None:
        """In the thread: opens the save below, with what it has lost meanwhile stored again."""
        made: str | Manifest | Refused
        version = demotion.version
        try:
            draft = make()
            here = self.store.holds([entry.key for entry in draft.objects])
            draft = draft.with_objects(e if e.key in here else e._replace(parts=()) for e in draft.objects)
            new = [entry.key for entry in draft.new_objects]
            if not here.isdisjoint(new):
                made = self._stored_unheard(draft)
            elif not self._storing.isdisjoint(new):
                made = Refused("rows that the store had lost are on their way with another version", "gone")
            else:
                made = self.store.prepare(draft, sum(sizes[key] for key in new))
            if isinstance(made, str):
                demotion.new = frozenset(new)
                self._storing |= demotion.new
        except ValueError as error:
            logger.exception("version %s cannot be stored", version.version_id)
            made, new = Refused(f"it cannot be written down: {error}", "invalid"), []
        except Exception as error:
            logger.exception("version %s could not be offered to the store", version.version_id)
            made, new = Refused(f"{type(error).__name__}: {error}", "unavailable"), []
        self._tell(partial(self._prepared, demotion, made, [(ids[key], key) for key in new]))

    def _stored_unheard(self, draft: Manifest) -> Manifest | Refused:
        """In the thread: returns the version as it is below, from a save whose answer was lost; or that a relative's was."""
        found = self.store.find(draft.namespace, draft.version)
        if isinstance(found, Manifest) and {e.key for e in found.objects} <= {e.key for e in draft.objects}:
            return found
        return Refused("rows that it shares are below from a save whose answer was lost", "gone")

    def _prepared(self, demotion: _Demotion, made: str | Manifest | Refused, new: list[tuple[int, str]]) -> None:
        self._preparing -= 1
        if isinstance(made, Refused):
            self._not_stored(demotion, made)
            return
        if isinstance(made, Manifest):
            self._completing += 1
            self._completed(demotion, made)
            return
        demotion.ticket = made
        if new:
            self._demotions[made] = demotion
            self._orders.demote.append(DemoteOrder(made, new))
        else:
            self._end_save(demotion)

    def _end_save(self, demotion: _Demotion) -> None:
        self._completing += 1
        self._down.submit(partial(self._complete, demotion))

    def _complete(self, demotion: _Demotion) -> None:
        """In the thread: seals the save, or takes it back."""
        made: Manifest | Refused
        self._storing -= demotion.new
        try:
            made = (
                Refused("a rank could not store its part", "unavailable")
                if demotion.failed
                else self.store.complete(demotion.ticket)
            )
        except Exception as error:
            logger.exception("version %s could not be stored", demotion.version.version_id)
            made = Refused(f"{type(error).__name__}: {error}", "unavailable")
        if isinstance(made, Refused):
            try:
                self.store.abort(demotion.ticket)
            except Exception:
                logger.exception("the save of version %s could not be ended", demotion.version.version_id)
        self._tell(partial(self._completed, demotion, made))

    def _completed(self, demotion: _Demotion, made: Manifest | Refused) -> None:
        self._completing -= 1
        if isinstance(made, Refused):
            self._not_stored(demotion, made)
            return
        self._going -= demotion.keys
        self.index.note_parts({entry.key: entry.parts for entry in made.objects})
        self.index.unpin(demotion.version)
        self._news = True
        while self._owed:  # it takes versions again
            self._waiting.append(self._owed.popitem(last=False)[1])

    def _not_stored(self, demotion: _Demotion, refused: Refused) -> None:
        version = demotion.version
        self._going -= demotion.keys
        self.index.unpin(version)
        self._news = True
        logger.warning("version %s stays in memory only: %s", version.version_id, refused.reason)
        if refused.kind in ("unavailable", "full", "gone"):
            self._owed[version.key] = version
            while len(self._owed) > _MOST_OWED:
                self._owed.popitem(last=False)

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
                self._orders.stage.append(StageOrder(number, objects))
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
        wait = idle and (self._seeks or self._preparing or self._completing)
        try:
            self._results.get(timeout=_POLL_S)() if wait else self._results.get_nowait()()
            while True:
                self._results.get_nowait()()
        except queue.Empty:
            pass
        self._start_demotions()

    def take_orders(self, orders: StepOrders) -> None:
        """Moves the orders that are due into a step's."""
        orders.demote, orders.stage = self._orders.demote, self._orders.stage
        self._orders = StepOrders()

    def on_report(self, report: StepReport) -> None:
        """Takes in what the ranks stored and fetched."""
        for ticket, part in report.demoted.items():
            demotion = self._demotions[ticket]
            demotion.done += part.ranks
            demotion.failed |= part.failed
            if demotion.done == self.ranks:
                del self._demotions[ticket]
                self._end_save(demotion)
        for number, staged in report.staged.items():
            staging = self._stagings[number]
            staging.ranks_left -= staged.ranks
            staging.lost |= staged.lost
        self._commit_staged()

    @property
    def open_saves(self) -> int:
        """How many versions are on their way down."""
        return len(self._waiting) + self._preparing + len(self._demotions) + self._completing

    @property
    def busy(self) -> bool:
        """Whether the engine must keep stepping for this."""
        return bool(self.open_saves or self._seeks or self._stagings or self._news)

    def take_stats(self) -> dict[str, Any] | None:
        """Returns the counters, when they have changed since they were taken last."""
        if not self._news:
            return None
        self._news = False
        return {"open_saves": self.open_saves, "owed": len(self._owed), "tiers": [dict(stats) for stats in self._stats]}

    def close(self) -> None:
        """Ends the threads after what they have queued, and the store."""
        self._up.close()
        self._down.close()
        self.store.close()
