"""Saves: rows of finished requests become packed objects, a bounded number of rows a step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from agentcache.config import ConnectorConfig
from agentcache.engine.orders import SaveOrder, StepReport, Stored
from agentcache.engine.runtime import Runtime
from agentcache.store.payloads import PayloadStore

__all__ = ["Saver"]

logger = logging.getLogger(__name__)

_IDLE_SAVE_TOKENS = 4096  # rows gathered a step when nothing else runs: a new request waits no longer than that


@dataclass(slots=True)
class _Save:
    order: SaveOrder
    done: int = 0
    failed: bool = False


class Saver:
    """The open saves of one rank. A save that fails is reported as such and costs its request nothing.

    Args:
        config: The connector's settings.
        store: Where the objects go.
    """

    def __init__(self, config: ConnectorConfig, store: PayloadStore) -> None:
        self.config = config
        self.store = store
        self._saves: deque[_Save] = deque()
        self._finished: set[str] = set()

    def add(self, orders: Iterable[SaveOrder]) -> None:
        """Opens saves."""
        self._saves.extend(_Save(order) for order in orders)

    def advance(self, runtime: Runtime | None, scheduled_tokens: int, report: StepReport) -> None:
        """Gathers all that fits in the share of a step that computes `scheduled_tokens` tokens; adds to the report."""
        budget = self.config.save_tokens_per_step if scheduled_tokens else _IDLE_SAVE_TOKENS
        while self._saves and budget > 0:
            save = self._saves[0]
            while save.done < len(save.order.objects) and budget > 0 and not save.failed:
                budget -= self._gather(save, runtime, report)
            if save.failed or save.done == len(save.order.objects):
                self._saves.popleft()
                self._finish(save, report)

    def _gather(self, save: _Save, runtime: Runtime | None, report: StepReport) -> int:
        """Stores the next object of a save; returns its rows."""
        new = save.order.objects[save.done]
        save.done += 1
        if runtime is None:  # the first request may end before the model is attached
            save.failed = True
            return 0
        try:
            blocks = torch.tensor(save.order.block_ids, dtype=torch.int64)
            runs = runtime.gather(blocks, new.start, new.stop, save.order.precision)
            payload = self.store.put(new.object_id, runs)
            report.stored[new.object_id] = Stored(payload.size_bytes, payload.tag, payload.lossless)
        except Exception:
            logger.exception("agentcache could not save the KV of request %s", save.order.request_id)
            save.failed = True
        return new.stop - new.start

    def _finish(self, save: _Save, report: StepReport) -> None:
        self._finished.add(save.order.request_id)
        (report.unsaved if save.failed else report.saved).add(save.order.request_id)

    def clear(self, report: StepReport) -> None:
        """Ends every open save as failed."""
        while self._saves:
            save = self._saves.popleft()
            save.failed = True
            self._finish(save, report)

    def take_finished(self) -> set[str]:
        """Returns the requests whose saves ended since the last call."""
        out, self._finished = self._finished, set()
        return out

    @property
    def pending(self) -> int:
        """How many saves are open."""
        return len(self._saves)
