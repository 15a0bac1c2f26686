"""Versions on their way down into a durable tier.

```
committed in memory -> prepare (thread) -> DemoteOrder -> each rank puts (its thread) -> complete (thread)
```

A version that goes down is pinned in memory until then; one that the tier refuses stays in memory, and is offered again after the
next that it took.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from agentcache.engine.orders import Demoted, DemoteOrder
from agentcache.store.index import CheckpointIndex, Version
from agentcache.store.tiers import KVStore, Manifest, ObjectEntry, Refused, StoredExtent
from agentcache.store.tiers.background import Background
from agentcache.store.version import BlockObject

__all__ = ["Demotions"]

logger = logging.getLogger(__name__)

_OPEN = 2  # at a time: one is prepared while the ranks store another
_MOST_JOBS = 1024
_MOST_OWED = 256
_HEAD_BYTES = 1024  # more than the head and the run table of one rank's payload take


@dataclass(slots=True)
class _Demotion:
    version: Version
    keys: frozenset[str]
    new: frozenset[str] = frozenset()
    ticket: str = ""
    done: int = 0
    failed: bool = False


class Demotions:
    """Moves committed versions into a store. All calls are the scheduler thread's.

    Args:
        store: Opened with this engine's fingerprint.
        index: The versions in memory.
        fingerprint: Of this engine, see `engine.fingerprint`.
        ranks: Tensor-parallel ranks; each stores its part.
        tell: Called in the thread with what the scheduler's thread shall do.

    Attributes:
        news: Whether something has changed since this was last set to False.
    """

    def __init__(
        self,
        store: KVStore,
        index: CheckpointIndex,
        fingerprint: Mapping[str, str],
        ranks: int,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        self.news = False
        self._store = store
        self._index = index
        self._fingerprint = dict(fingerprint)
        self._ranks = ranks
        self._tell = tell
        self._thread = Background("agentcache-demote", _MOST_JOBS, yields=True)
        self._waiting: deque[Version] = deque()
        self._owed: OrderedDict[tuple[str, str], Version] = OrderedDict()
        # Objects that open saves put below; the thread's alone, which opens and seals them.
        self._storing: set[str] = set()
        # Objects that open demotions store: what shares them waits, and then shares them below too.
        self._going: set[str] = set()
        self._preparing = 0
        self._demotions: dict[str, _Demotion] = {}
        self._completing = 0
        self._orders: list[DemoteOrder] = []

    @property
    def open(self) -> int:
        """How many versions are on their way down."""
        return len(self._waiting) + self._preparing + len(self._demotions) + self._completing

    @property
    def in_thread(self) -> bool:
        """Whether the thread is at work."""
        return bool(self._preparing or self._completing)

    @property
    def owed(self) -> int:
        """How many versions wait for the tier to take some again."""
        return len(self._owed)

    def take_orders(self) -> list[DemoteOrder]:
        """Returns the orders that are due, each once."""
        orders, self._orders = self._orders, []
        return orders

    def on_report(self, ticket: str, part: Demoted) -> None:
        """Takes in what ranks have stored of a version."""
        demotion = self._demotions[ticket]
        demotion.done += part.ranks
        demotion.failed |= part.failed
        if demotion.done == self._ranks:
            del self._demotions[ticket]
            self._end_save(demotion)

    def close(self) -> None:
        """Ends the thread after what it has queued."""
        self._thread.close()

    def save(self, version: Version) -> None:
        """Queues a committed version to be stored below."""
        self._waiting.append(version)
        self.news = True
        self.start()

    def start(self) -> None:
        """Begins as many demotions as may be open."""
        while self._waiting and self._preparing + len(self._demotions) + self._completing < _OPEN:
            version = self._waiting[0]
            blocks = self._index.objects_of(version) if version.state == "committed" else []
            going = frozenset(block.key for block in blocks if not block.parts)
            if not going.isdisjoint(self._going):
                return
            self._waiting.popleft()
            if version.state != "committed":
                continue  # evicted from memory before its turn came
            # Made in the thread: it packs all token ids, and checks what it is given.
            draft = self._draft(version, blocks)
            sizes = {block.key: block.size_bytes + self._ranks * _HEAD_BYTES for block in blocks}
            ids = {block.key: block.object_id for block in blocks}
            self._index.pin(version)
            self._going |= going
            self._preparing += 1
            if not self._thread.submit(partial(self._prepare, _Demotion(version, going), draft, sizes, ids)):
                self._preparing -= 1
                self._not_stored(_Demotion(version, going), Refused("too many saves wait for the store", "unavailable"))

    def _draft(self, version: Version, blocks: list[BlockObject]) -> Callable[[], Manifest]:
        keys = {block.object_id: block.key for block in blocks}
        return partial(
            Manifest.draft,
            fingerprint=self._fingerprint,
            namespace=version.namespace,
            version=version.version_id,
            token_ids=version.token_ids,
            extents=[StoredExtent(keys[e.object_id], *e[1:]) for e in version.extents],
            objects=[ObjectEntry(b.key, b.tokens, b.source_position, b.exact, b.tag, b.parts) for b in blocks],
            group=version.group,
            parent=version.parent,
            exact_end=version.exact_end,
            salts=version.salts,
            ranks=self._ranks,
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
            here = self._store.holds([entry.key for entry in draft.objects])
            draft = draft.with_objects(e if e.key in here else e._replace(parts=()) for e in draft.objects)
            new = [entry.key for entry in draft.new_objects]
            if not here.isdisjoint(new):
                made = self._stored_unheard(draft)
            elif not self._storing.isdisjoint(new):
                made = Refused("rows that the store had lost are on their way with another version", "gone")
            else:
                made = self._store.prepare(draft, sum(sizes[key] for key in new))
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
        found = self._store.find(draft.namespace, draft.version)
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
            self._orders.append(DemoteOrder(made, new))
        else:
            self._end_save(demotion)

    def _end_save(self, demotion: _Demotion) -> None:
        self._completing += 1
        self._thread.submit(partial(self._complete, demotion))

    def _complete(self, demotion: _Demotion) -> None:
        """In the thread: seals the save, or takes it back."""
        made: Manifest | Refused
        self._storing -= demotion.new
        try:
            made = (
                Refused("a rank could not store its part", "unavailable")
                if demotion.failed
                else self._store.complete(demotion.ticket)
            )
        except Exception as error:
            logger.exception("version %s could not be stored", demotion.version.version_id)
            made = Refused(f"{type(error).__name__}: {error}", "unavailable")
        if isinstance(made, Refused):
            try:
                self._store.abort(demotion.ticket)
            except Exception:
                logger.exception("the save of version %s could not be ended", demotion.version.version_id)
        self._tell(partial(self._completed, demotion, made))

    def _completed(self, demotion: _Demotion, made: Manifest | Refused) -> None:
        self._completing -= 1
        if isinstance(made, Refused):
            self._not_stored(demotion, made)
            return
        self._going -= demotion.keys
        self._index.note_parts({entry.key: entry.parts for entry in made.objects})
        self._index.unpin(demotion.version)
        self.news = True
        while self._owed:  # it takes versions again
            self._waiting.append(self._owed.popitem(last=False)[1])

    def _not_stored(self, demotion: _Demotion, refused: Refused) -> None:
        version = demotion.version
        self._going -= demotion.keys
        self._index.unpin(version)
        self.news = True
        logger.warning("version %s stays in memory only: %s", version.version_id, refused.reason)
        if refused.kind in ("unavailable", "full", "gone"):
            self._owed[version.key] = version
            while len(self._owed) > _MOST_OWED:
                self._owed.popitem(last=False)
