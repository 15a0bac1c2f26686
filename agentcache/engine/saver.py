"""Saves: rows of finished requests become packed objects, a bounded share of each engine step.

With `mixed` precision a save first measures how much each of its rows is attended to and what 4 bits would lose of it:

```
one forward of the last rows  ->  attention, a sampled layer at a time  ->  per object: residuals, tags, gather
        a step                             a step each                       `save_tokens_per_step` rows a step
```

That holds while other requests run; an idle engine does several pieces a step. The tensor-parallel ranks do the same work in
the same steps, whatever fails on one of them, and agree on what they measured before they use it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from agentcache.config import ConnectorConfig
from agentcache.engine.attention_probe import Queries
from agentcache.engine.orders import SaveOrder, StepReport, Stored
from agentcache.engine.precision import MIXED, block_tags, known_precisions, normalised_attention, tagged_sources
from agentcache.engine.runtime import Runtime
from agentcache.kernels import Source, Tag
from agentcache.store.extents import NewObject
from agentcache.store.payloads import PayloadStore
from agentcache.store.scores import Codes, encode_scores

__all__ = ["Saver"]

logger = logging.getLogger(__name__)

_IDLE_SAVE_TOKENS = 4096  # rows gathered a step when nothing else runs, or a request waits for them
_IDLE_PIECE_TOKENS = 512  # what a piece of measuring counts as there

_Work = Generator[int | None, None, None]
"""Yields after each piece of work: the rows that were gathered, or None for a piece that takes a step's whole share."""


@dataclass(slots=True)
class _Save:
    """One open save; `work` is None until its first step."""

    order: SaveOrder
    work: _Work | None = None
    stored: dict[int, Stored] = field(default_factory=dict)
    attention: Codes | None = None
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
        self._credit = 0  # rows that may be gathered

    def add(self, orders: Iterable[SaveOrder]) -> None:
        """Opens saves."""
        self._saves.extend(_Save(order) for order in orders)

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
        # Objects have more rows than a step's share: what one takes beyond it, later steps do without.
        self._credit = min(self._credit, 0) + self.config.save_tokens_per_step if shared else _IDLE_SAVE_TOKENS
        while self._saves and self._credit > 0:
            save = self._saves[0]
            if save.work is None:
                save.work = _work(save, runtime, self.store)
            for rows in save.work:
                piece = self._credit if shared else _IDLE_PIECE_TOKENS
                self._credit -= piece if rows is None else rows
                if self._credit <= 0:
                    break
            else:
                self._finish(self._saves.popleft(), report)
            report.stored |= save.stored
            save.stored.clear()

    def _finish(self, save: _Save, report: StepReport) -> None:
        request_id = save.order.request_id
        self._finished.add(request_id)
        (report.unsaved if save.failed else report.saved).add(request_id)
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


def _work(save: _Save, runtime: Runtime | None, store: PayloadStore) -> _Work:
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
    attention = (yield from _attention(order, blocks, runtime)) if measure else None
    if attention is not None:
        save.attention = encode_scores(attention)
    for new in order.objects:
        rows = new.stop - new.start
        residual = _residual(order, new, blocks, runtime) if measure else None
        stored = None
        try:
            if not measure:
                sources: Iterable[Source] = [Source(new.start, rows, order.precision)]
            elif attention is None or residual is None:  # a risk that is not known is not guessed
                sources = [Source(new.start, rows, Tag.EXACT)]
            else:
                sources = tagged_sources(
                    new.start, new.stop, block_tags(attention[new.start : new.stop], residual.numpy())
                )
            payload = store.put(
                new.object_id,
                runtime.gather_runs(blocks, sources),
                None if residual is None else encode_scores(residual.numpy()),
            )
            stored = Stored(payload.size_bytes, payload.tag, payload.lossless)
        except Exception:
            logger.exception("agentcache could not save the KV of request %s", order.request_id)
        (kept,) = runtime.all_ranks([stored is not None])
        if stored is not None:
            save.stored[new.object_id] = stored
        if not kept:
            save.failed = True
            return
        yield rows


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


def _residual(order: SaveOrder, new: NewObject, blocks: torch.Tensor, runtime: Runtime) -> torch.Tensor | None:
    """Returns what 4 bits would lose of each row's values, agreed by all ranks, or None when it cannot be measured."""
    residual: torch.Tensor | None = None
    try:
        residual = runtime.value_residual(blocks, new.start, new.stop)
    except Exception:
        logger.exception(
            "agentcache could not measure rows %d to %d of request %s; they are stored exactly",
            new.start,
            new.stop,
            order.request_id,
        )
    return runtime.mean_over_ranks(residual, new.stop - new.start)
