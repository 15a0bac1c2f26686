"""Saves: rows of finished requests become packed objects, a bounded share of each engine step.

With `mixed` precision a save first measures how much each of its rows is attended to and what 4 bits would lose of it:

```
one forward of the last rows  ->  attention, a sampled layer at a time  ->  128 rows at a time: residuals, tags, gather
        a step                             a step each                       `save_tokens_per_step` rows a step
```

That holds while other requests run; an idle engine does several pieces a step. The tensor-parallel ranks do the same work in
the same steps, whatever fails on one of them, and agree on what they measured before they use it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from agentcache.config import ConnectorConfig
from agentcache.engine.attention_probe import Queries
from agentcache.engine.orders import SaveOrder, StepReport, Stored
from agentcache.engine.precision import (
    MIXED,
    Thresholds,
    block_tags,
    known_precisions,
    normalised_attention,
    tagged_sources,
)
from agentcache.engine.runtime import Runtime
from agentcache.kernels import PackedRun, Source, Tag
from agentcache.store.extents import NewObject
from agentcache.store.payloads import PayloadStore
from agentcache.store.scores import Codes, encode_scores

__all__ = ["Saver"]

logger = logging.getLogger(__name__)

_IDLE_SAVE_TOKENS = 4096  # rows gathered a step when nothing else runs, or a request waits for them
_IDLE_PIECE_TOKENS = 512  # what a piece of measuring counts as there
_PIECE_ROWS = 128
"""Rows gathered at a time: whole groups of key scales, so few that no step of others is held up (SmolLM2 on two cores: 0.6 ms)."""

_Work = Generator[int | None, None, None]
"""Yields after each piece of work: the rows that were gathered, or None for a piece that takes a step's whole share."""


@dataclass(slots=True)
class _Save:
    """One open save; `work` is None until its first step."""

    order: SaveOrder
    opened: float
    work: _Work | None = None
    stored: dict[int, Stored] = field(default_factory=dict)
    attention: Codes | None = None
    failed: bool = False


class Saver:
    """The open saves of one rank. A save that fails is reported as such and costs its request nothing.

    Args:
        config: The connector's settings.
        store: Where the objects go.

    Attributes:
        thresholds: Of mixed precision.
        counts: `saves` that ended well, `save_s`, the seconds from their orders to their ends, and `attention_s`, those of them in
            which attention was measured.
    """

    def __init__(self, config: ConnectorConfig, store: PayloadStore) -> None:
        self.config = config
        self.store = store
        self.thresholds = Thresholds(**config.thresholds)
        self._saves: deque[_Save] = deque()
        self.counts = {"saves": 0, "save_s": 0.0, "attention_s": 0.0}
        self._finished: set[str] = set()
        self._credit = 0  # rows that may be gathered

    def add(self, orders: Iterable[SaveOrder]) -> None:
        """Opens saves."""
        now = time.perf_counter()
        self._saves.extend(_Save(order, now) for order in orders)

    def advance(
        self, runtime: Runtime | None, scheduled_tokens: int, report: StepReport, *, hurry: bool = False
    ) -> None:
        """Does all that fits in the share of a step that computes `scheduled_tokens` tokens; adds to the report.

        Args:
            runtime: The rank's, once it is attached.
            scheduled_tokens: What vLLM computes in this step.
            report: Of this step.
            hurry: Whether a request waits for a save: then it comes before the steps of those that decode.
        """
        shared = bool(scheduled_tokens) and not hurry
        # As many rows as the step computes are a small part of it, and saves, which hold blocks, then never fall behind. What a
        # piece takes beyond the share, later steps do without.
        share = max(self.config.save_tokens_per_step, scheduled_tokens) if shared else _IDLE_SAVE_TOKENS
        self._credit = min(self._credit, 0) + share if shared else share
        while self._saves and self._credit > 0:
            save = self._saves[0]
            if save.work is None:
                save.work = _work(save, runtime, self.store, self.thresholds)
            for rows in self._timed(save.work):
                piece = self._credit if shared else _IDLE_PIECE_TOKENS
                self._credit -= piece if rows is None else rows
                if self._credit <= 0:
                    break
            else:
                self._finish(self._saves.popleft(), report)
            report.stored |= save.stored
            save.stored.clear()

    def _timed(self, work: Iterator[int | None]) -> Iterator[int | None]:
        """Yields the pieces of a save's work; counts the time of those that measure attention, which gather no rows."""
        started = time.perf_counter()
        for rows in work:
            if rows is None:
                self.counts["attention_s"] += time.perf_counter() - started
            yield rows
            started = time.perf_counter()

    def _finish(self, save: _Save, report: StepReport) -> None:
        request_id = save.order.request_id
        self._finished.add(request_id)
        (report.unsaved if save.failed else report.saved).add(request_id)
        if not save.failed:
            self.counts["saves"] += 1
            self.counts["save_s"] += time.perf_counter() - save.opened
        if save.attention is not None and not save.failed:
            report.attention[request_id] = save.attention.tobytes()

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


def _work(save: _Save, runtime: Runtime | None, store: PayloadStore, thresholds: Thresholds) -> _Work:
    """Does a save piece by piece; leaves the outcome in it."""
    order = save.order
    if runtime is None:  # the first request may end before the model is attached
        save.failed = True
        return
    if order.precision not in known_precisions():
        logger.error(
            "agentcache does not save request %s: precision %r is none of %s",
            order.request_id,
            order.precision,
            ", ".join(sorted(known_precisions())),
        )
        save.failed = True
        return
    blocks = torch.tensor(order.block_ids, dtype=torch.int64)
    measure = order.precision == MIXED
    attention = (yield from _attention(order, blocks, runtime)) if measure or order.attention else None
    if attention is not None:
        save.attention = encode_scores(attention)
    for new in order.objects:
        runs: list[PackedRun] = []
        residuals: list[Codes | None] = []
        for start in range(new.start, new.stop, _PIECE_ROWS):
            stop = min(start + _PIECE_ROWS, new.stop)
            residual = _residual(order, start, stop, blocks, runtime) if measure else None
            residuals.append(None if residual is None else encode_scores(residual.numpy()))
            done = False
            try:
                runs += runtime.gather_runs(blocks, _sources(order, start, stop, attention, residual, thresholds))
                if stop == new.stop:
                    save.stored[new.object_id] = _put(store, new, runs, residuals)
                done = True
            except Exception:
                logger.exception("agentcache could not save the KV of request %s", order.request_id)
            if not runtime.all_ranks([done])[0]:
                save.failed = True
                return
            yield stop - start


def _sources(
    order: SaveOrder,
    start: int,
    stop: int,
    attention: np.ndarray[tuple[int], np.dtype[np.float32]] | None,
    residual: torch.Tensor | None,
    thresholds: Thresholds,
) -> Iterable[Source]:
    """Returns rows `[start, stop)` with their precision."""
    if order.precision != MIXED:
        return [Source(start, stop - start, order.precision)]
    if attention is None or residual is None:  # a risk that is not known is not guessed
        return [Source(start, stop - start, Tag.EXACT)]
    return tagged_sources(start, stop, block_tags(attention[start:stop], residual.numpy(), thresholds))


def _put(store: PayloadStore, new: NewObject, runs: list[PackedRun], residuals: list[Codes | None]) -> Stored:
    """Adds an object whose rows are all gathered to the store."""
    known = [codes for codes in residuals if codes is not None]
    payload = store.put(new.object_id, runs, np.concatenate(known) if len(known) == len(residuals) else None)
    return Stored(payload.size_bytes, payload.tag, payload.lossless)


def _attention(
    order: SaveOrder, blocks: torch.Tensor, runtime: Runtime
) -> Generator[None, None, np.ndarray[tuple[int], np.dtype[np.float32]] | None]:
    """Measures how much each row of a version is attended to, in pieces; returns it normalised, or None when it cannot be."""
    rows = len(order.token_ids)
    queries: Queries | None = None
    total: torch.Tensor | None = None
    try:
        queries = runtime.queries(order.token_ids, blocks, order.prompt_tokens)
        total = torch.zeros(rows)
    except Exception:
        logger.exception(
            "agentcache could not ask for the attention of request %s; it is stored exactly", order.request_id
        )
    yield None
    # Also after a failure: the other ranks are at work and must meet this one below in the same step.
    for index in range(len(runtime.sampled)):
        try:
            if queries is not None and total is not None:
                total += runtime.attention_mass(queries, index, blocks, rows)
        except Exception:
            logger.exception(
                "agentcache could not measure the attention of request %s; it is stored exactly", order.request_id
            )
            total = None
        yield None
    mass = runtime.mean_over_ranks(total, rows)
    if mass is not None and not bool(torch.isfinite(mass).all()):
        logger.error("the attention of request %s is not finite; it is stored exactly", order.request_id)
        mass = None
    return None if mass is None else normalised_attention(mass.numpy())


def _residual(order: SaveOrder, start: int, stop: int, blocks: torch.Tensor, runtime: Runtime) -> torch.Tensor | None:
    """Returns what 4 bits would lose of each row's values, agreed by all ranks, or None when it cannot be measured."""
    residual: torch.Tensor | None = None
    try:
        residual = runtime.value_residual(blocks, start, stop)
    except Exception:
        logger.exception(
            "agentcache could not measure rows %d to %d of request %s; they are stored exactly",
            start,
            stop,
            order.request_id,
        )
    return runtime.mean_over_ranks(residual, stop - start)
