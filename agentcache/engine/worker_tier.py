"""The worker half's side of a durable tier: this rank's payloads go down and come up on threads of their own."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

from agentcache.engine.orders import Demoted, DemoteOrder, Staged, StageOrder, StepReport
from agentcache.store.payloads import Payload, PayloadStore, decode_payload, encode_payload, is_intact
from agentcache.store.tiers import KVStore, Lost, Manifest, Refused, StoreStats
from agentcache.store.tiers.background import Background

__all__ = ["WorkerTier"]

logger = logging.getLogger(__name__)

_MOST_JOBS = 4096
_CHUNK = 8  # payloads that are fetched at a time


class WorkerTier:
    """Stores and fetches payloads below memory. All calls but those of the threads are the worker thread's.

    Args:
        store: Opened with this engine's fingerprint; closed with this.
        rank: This rank's number.
        verify: Whether checksums are compared before a payload goes down.
        warm_bytes: Most bytes of payloads that a resume hint may fetch ahead.
        is_sound: Whether a fetched payload is one that this engine can restore.
    """

    def __init__(
        self, store: KVStore, rank: int, *, verify: bool, warm_bytes: int, is_sound: Callable[[Payload], bool]
    ) -> None:
        self.store = store
        self.rank = rank
        self.verify = verify
        self.warm_bytes = warm_bytes
        self.is_sound = is_sound
        self._down = Background("agentcache-put", _MOST_JOBS, yields=True)
        self._up = Background("agentcache-fetch", _MOST_JOBS)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._demoted: dict[str, Demoted] = {}
        self._staged: dict[int, dict[int, Payload | Lost]] = {}
        self._warm: OrderedDict[str, Payload] = OrderedDict()
        self._warm_size = 0
        self._open = 0
        # As the threads saw it last: asking a store may take as long as a hung server's timeout.
        self.stats: tuple[StoreStats, ...] = ()
        self._up.submit(self._note_stats)

    def _note_stats(self) -> None:
        self.stats = self.store.stats()

    # -- down ----------------------------------------------------------------------------------------------------------

    def demote(self, order: DemoteOrder, payloads: PayloadStore) -> None:
        """Begins to store objects below; those that are gone fail the order."""
        self._begin()
        found = [(key, payloads.get(object_id)) for object_id, key in order.objects]
        if not self._down.submit(partial(self._put, order.ticket, found)):
            self._end_demotion(order.ticket, failed=True)

    def _put(self, ticket: str, payloads: Iterable[tuple[str, Payload | None]]) -> None:
        failed = True
        try:
            failed = not all(self._put_one(ticket, key, payload) for key, payload in payloads)
        finally:
            self._end_demotion(ticket, failed=failed)

    def _put_one(self, ticket: str, key: str, payload: Payload | None) -> bool:
        if payload is None or (self.verify and not is_intact(payload)):
            logger.warning("object %s is gone or damaged in memory; its version is not stored", key)
            return False
        made = self.store.put(ticket, key, self.rank, encode_payload(payload))
        if isinstance(made, Refused):
            logger.warning("object %s could not be stored: %s", key, made.reason)
            return False
        return True

    def _end_demotion(self, ticket: str, *, failed: bool) -> None:
        with self._lock:
            self._demoted[ticket] = Demoted(1, failed)
        self._news.set()
        self._note_stats()  # last: the thread's log says so when a store cannot give them

    # -- up ------------------------------------------------------------------------------------------------------------

    def stage(self, order: StageOrder) -> None:
        """Begins to fetch objects from below."""
        self._begin()
        if not self._up.submit(partial(self._fetch, order)):
            self._end_staging(order, {})

    def _fetch(self, order: StageOrder) -> None:
        found: dict[str, Payload | Lost] = {}
        try:
            found = self._fetch_payloads({key: (rows, tag) for _, key, rows, tag in order.objects})
        finally:
            self._end_staging(order, found)

    def _fetch_payloads(self, wanted: dict[str, tuple[int, str]]) -> dict[str, Payload | Lost]:
        """Returns payloads by key, given their rows and tags; those that a hint has fetched at once. In the thread."""
        out: dict[str, Payload | Lost] = {}
        with self._lock:
            for key in wanted:
                warm = self._warm.pop(key, None)
                if warm is not None:
                    self._warm_size -= warm.size_bytes
                    out[key] = warm
        keys = [key for key in wanted if key not in out]
        for at in range(0, len(keys), _CHUNK):
            for key, blob in self.store.fetch(keys[at : at + _CHUNK], self.rank).items():
                try:
                    out[key] = blob if isinstance(blob, Lost) else decode_payload(blob, verify=self.verify)
                except ValueError as error:
                    out[key] = Lost(str(error), "corrupt")
        for key, payload in out.items():
            if isinstance(payload, Payload) and not self._is_wanted(payload, *wanted[key]):
                out[key] = Lost("it has other rows than its manifest says", "corrupt")
        return out

    def _is_wanted(self, payload: Payload, rows: int, tag: str) -> bool:
        # An object is `mixed` also when its ranks differ.
        return payload.tokens == rows and tag in (payload.tag, "mixed") and self.is_sound(payload)

    def _end_staging(self, order: StageOrder, found: dict[str, Payload | Lost]) -> None:
        absent = Lost("it was not fetched", "unavailable")
        with self._lock:
            self._staged[order.number] = {object_id: found.get(key, absent) for object_id, key, *_ in order.objects}
        self._news.set()
        self._note_stats()

    def warm(self, namespace: str, version: str) -> None:
        """Begins to fetch a version that is likely to be resumed, so that its payloads are here when it is."""
        self._up.submit(partial(self._warm_up, namespace, version))

    def _warm_up(self, namespace: str, version: str) -> None:
        found = self.store.find(namespace, version)
        if not isinstance(found, Manifest) or self.rank >= found.ranks:
            return
        wanted = {e.key: (e.tokens, e.tag) for e in found.objects if e.key not in self._warm}
        for key, payload in self._fetch_payloads(wanted).items():
            if isinstance(payload, Payload):
                with self._lock:
                    self._warm[key] = payload
                    self._warm_size += payload.size_bytes
                    while self._warm_size > self.warm_bytes:
                        self._warm_size -= self._warm.popitem(last=False)[1].size_bytes

    # -- a step --------------------------------------------------------------------------------------------------------

    def collect(self, payloads: PayloadStore, report: StepReport) -> None:
        """Takes in what the threads have done: fetched payloads into memory, the rest into the report."""
        with self._lock:
            demoted, self._demoted = self._demoted, {}
            staged, self._staged = self._staged, {}
            self._news.clear()
        self._open -= len(demoted) + len(staged)
        report.demoted |= demoted
        for number, found in staged.items():
            lost = frozenset(object_id for object_id, payload in found.items() if isinstance(payload, Lost))
            for object_id, payload in found.items():
                if isinstance(payload, Payload):
                    payloads.add(object_id, payload)
            report.staged[number] = Staged(1, lost)

    def wait(self, seconds: float) -> None:
        """Returns when a thread has news, or after a while, or at once when nothing is open."""
        if self._open:
            self._news.wait(seconds)

    def _begin(self) -> None:
        self._open += 1

    @property
    def pending(self) -> int:
        """How many orders are open."""
        return self._open

    def close(self) -> None:
        """Ends the threads after what they have queued, and the store."""
        self._down.close()
        self._up.close()
        self.store.close()
