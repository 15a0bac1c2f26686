"""Online policies in the worker: measure the restored rows, let the policy choose, recompute; all inside the step that restores.

```
measure    CHECK: layers before the check layer over X and S     QUERY: X, the planned part of R and the query rows
choose     the policy, on arrays
recompute  what it chose, with what was planned if that did not run yet; again while an iterative policy finds more
```

Every tensor-parallel rank chooses the same rows, since what they measure is averaged over them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from agentcache.engine.attention_probe import ASKING_ROWS
from agentcache.engine.hooks import Seen, forward_until, run_order, watch
from agentcache.engine.mean_shift import shift_means
from agentcache.engine.oracle import Oracle
from agentcache.engine.orders import LoadOrder, LoadReport
from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.recovery.base import Signal, Signals
from agentcache.types import Run, clip_runs, complement, merge_runs, run_tokens

__all__ = ["OnlineRepair"]

logger = logging.getLogger(__name__)


class OnlineRepair:
    """Chooses and repairs rows of one load, in rounds.

    Made when the load's rows are restored and nothing is computed yet.

    Args:
        runtime: The rank's pages and segment forward.
        order: With `online`.
        blocks: int64 block table of the request.
        extra: Rows that were lost and are recomputed in any case.
        report: Gets what was chosen, how long that took, and why it failed.
    """

    def __init__(
        self, runtime: Runtime, order: LoadOrder, blocks: torch.Tensor, extra: Sequence[Run], report: LoadReport
    ) -> None:
        assert order.online is not None
        self.runtime, self.order, self.online, self.blocks = runtime, order, order.online, blocks
        self.policy, self.context, self.report = order.online.policy, order.online.context, report
        planned = merge_runs([*order.recompute, *extra])
        self.rows = [
            Run(*run) for a, b in self.online.rows for run in complement(clip_runs(planned, a, b), b, a)
        ]  # may be chosen
        self.planned = planned
        self.stop = self.context.diff.new_len
        self.signals = Signals(done=self._mask(planned))
        self._stale = self._values(planned) if self._wants(Signal.AGREEMENT) else {}
        self._fresh: list[Run] = []
        self._ended = self._measured = False
        self._oracle: Oracle | None = None

    def _wants(self, signal: Signal) -> bool:
        return signal in self.policy.signals

    def _mask(self, runs: Sequence[Run]) -> Any:
        """Returns those rows of S that lie in the runs, bool `[new_len]`."""
        mask = np.zeros(self.stop, dtype=np.bool_)
        for run in self.context.diff.suffix:
            for start, stop in clip_runs(runs, run.new_start, run.new_stop):
                mask[start:stop] = True
        return mask

    # -- rounds --------------------------------------------------------------------------------------------------------

    def advance(self, pending: Sequence[Segment]) -> list[Segment]:
        """Returns the next rows to compute, none when all is done; call it again once they are computed.

        Args:
            pending: Rows that were planned and are not computed yet; they are computed here, or among the returned ones.
        """
        if self._ended:
            return list(pending)
        started = time.perf_counter()
        try:
            left, chosen = self._round(list(pending))
            ok = True
        except Exception as error:
            logger.exception("policy %s could not choose rows of request %s", self.policy.name, self.order.request_id)
            self.report.fault = (
                f"{self.policy.name} could not choose ({type(error).__name__}: {error}); S was recomputed"
            )
            ok = False
        if not self.runtime.all_ranks([ok])[0]:
            self._ended = True
            self.report.fault = (
                self.report.fault or f"{self.policy.name} could not choose on another rank; S was recomputed"
            )
            left, chosen = [Segment(self.order.token_ids, self.blocks, *run) for run in self.planned], self.rows
        computed = merge_runs([*(Run(s.start, s.stop) for s in left), *chosen, *self._again(chosen)])
        self.report.repaired = merge_runs([*self.report.repaired, *chosen])
        self.report.select_ms += (time.perf_counter() - started) * 1e3
        return [Segment(self.order.token_ids, self.blocks, a, b) for a, b in computed]

    def _again(self, chosen: Sequence[Run]) -> Iterator[Run]:
        """Yields rows that were computed before `chosen` ones, and stand behind the first of these: they have read stale rows.

        With one edit there are none: X and its window stand before all that can be chosen.
        """
        if chosen:
            end = len(self.order.token_ids)
            yield from clip_runs(merge_runs([*self.planned, *self.report.repaired]), min(chosen).start, end)

    def _round(self, pending: list[Segment]) -> tuple[list[Segment], list[Run]]:
        """Returns what is still to compute of `pending`, and the rows that were chosen."""
        if not self._measured:
            self._measured = True
            pending = self._measure(pending)
            self._fresh = list(self.planned)
            if pending and self._wants(Signal.AGREEMENT):
                return pending, []  # the planned window first: what it says decides how far to go
        if self._fresh and self._wants(Signal.AGREEMENT):
            self._compare()
        chosen = self._choose()
        done = merge_runs([*self.report.repaired, *chosen, *self.planned])
        self.signals = replace(self.signals, done=self._mask(done))
        self._ended = not (self.policy.iterative and chosen)
        if self._wants(Signal.AGREEMENT):
            self._stale |= self._values(chosen)
            self._fresh = list(chosen)
        if self.policy.probe_share is not None:
            self._repair_shifted(pending, [*chosen])
            self.report.repaired = merge_runs([*self.report.repaired, *chosen])
            return [], []
        if self.policy.transplants:
            assert self._oracle is not None, "transplants need effects"
            self._oracle.transplant(chosen)
            self.report.repaired = merge_runs([*self.report.repaired, *chosen])
            return pending, []
        return pending, chosen

    def _choose(self) -> list[Run]:
        picked = merge_runs(Run(int(a), int(b)) for a, b in self.policy.choose(self.context, self.signals))
        free = [Run(*r) for a, b in self.rows for r in complement(clip_runs(self.report.repaired, a, b), b, a)]
        return [run for a, b in free for run in clip_runs(picked, a, b)]

    # -- measures ------------------------------------------------------------------------------------------------------

    def _measure(self, pending: list[Segment]) -> list[Segment]:
        """Measures what the policy asks for before its first choice; returns what is still to compute of `pending`."""
        if self._wants(Signal.CHECK):
            self._check()
        if self._wants(Signal.QUERY):
            self._ask(pending)
            pending = []
        if self._wants(Signal.EFFECT):
            self.runtime.segments.run(pending)
            pending = []
            self._know()
        return pending

    def _ask(self, pending: list[Segment]) -> None:
        """Computes the pending rows and, in their last batch, the query rows right behind `load_end`; measures what these attend to.

        The query rows may stand further behind in the prompt, where the rows before them are not computed yet: moved up, they
        ask as if what lies between were not there. Their last rows may take the null block, which nobody reads.
        """
        runtime, end = self.runtime, len(self.order.token_ids)
        query = self.online.query
        size = runtime.block_size
        table = torch.cat([self.blocks[: -(-end // size)], torch.zeros(-(-len(query) // size), dtype=torch.int64)])
        asking = Segment([*self.order.token_ids, *query], table, end, end + len(query))
        *batches, last = [*runtime.segments.batches(pending)] or [[]]
        full = len(last) == runtime.segments.max_runs
        if full or sum(map(len, last)) + len(asking) > runtime.segments.max_tokens:
            batches, last = [*batches, last], []
        for batch in batches:
            runtime.segments.forward(batch)
        last = [*last, asking]
        order = run_order(last)
        first = sum(len(last[at]) for at in order[: order.index(len(last) - 1)])
        layers = runtime.query_layers
        caught: list[torch.Tensor] = []

        def see(_: int, seen: Seen) -> None:
            caught.append(seen.q[first : first + len(query)][-ASKING_ROWS:].clone())

        with watch([runtime.pages[layer].layer for layer in layers], see):
            runtime.segments.forward(last)
        positions = torch.arange(end, end + len(query))[-ASKING_ROWS:]
        mass = torch.zeros(end + len(query))
        for layer, queries in zip(layers, caught, strict=True):
            mass += runtime.layer_mass(layer, queries, positions, table, len(mass))
        runtime.clear_null_block()
        mean = runtime.mean_over_ranks(mass / len(layers), len(mass))
        assert mean is not None
        scores = np.zeros(self.stop, dtype=np.float32)
        scores[:end] = mean[:end].numpy()
        self.signals = replace(self.signals, query=scores)

    def _check(self) -> None:
        """Computes X and S up to the check layer and compares its K/V there with the stale ones."""
        runtime, layer = self.runtime, self.policy.check_layer
        if not 1 <= layer < len(runtime.pages):
            raise ValueError(f"check_layer={layer} is not allowed; take 1 to {len(runtime.pages) - 1} of this model")
        pages = runtime.pages[layer]
        sums = torch.zeros(4, self.stop)  # squares of: key difference, value difference, key, value
        spans = merge_runs([*self.planned, *self.online.rows])
        for batch in runtime.segments.batches(Segment(self.order.token_ids, self.blocks, *span) for span in spans):
            ordered = [batch[at] for at in run_order(batch)]

            def see(_: int, seen: Seen, runs: Sequence[Segment] = tuple(ordered)) -> None:
                at = 0
                for run in runs:
                    stale = pages.read(self.blocks.to(runtime.device), run.start, run.stop)
                    for row, (fresh, old) in enumerate(zip(seen[1:], stale, strict=True)):
                        new = fresh[at : at + len(run)].float()
                        sums[row, run.start : run.stop] = (new - old.float()).square().sum((1, 2)).cpu()
                        sums[row + 2, run.start : run.stop] = new.square().sum((1, 2)).cpu()
                    at += len(run)

            forward_until(runtime.segments, ordered, [pages.layer], see)
        total = runtime.mean_over_ranks(sums.flatten(), sums.numel())
        assert total is not None
        keys, values, key_norm, value_norm = (np.where(self._eligible(), x, 0) for x in total.view(4, -1).numpy())
        tiny = np.finfo(np.float32).tiny
        self.signals = replace(
            self.signals,
            key_error=keys.astype(np.float32),
            value_error=values.astype(np.float32),
            key_deviation=np.sqrt(keys / np.maximum(key_norm, tiny)).astype(np.float32),
            value_deviation=np.sqrt(values / np.maximum(value_norm, tiny)).astype(np.float32),
        )

    def _eligible(self) -> Any:
        return self._mask(self.rows)

    def _know(self) -> None:
        """Measures what each block would change if it were right."""
        first = min(run.start for run in [*self.planned, *self.rows])
        span = Run(first, len(self.order.token_ids))
        self._oracle = Oracle(self.runtime, self.order.token_ids, self.blocks, self.online.query, span)
        effect = np.zeros(self.stop, dtype=np.float32)
        for part, nats in self._oracle.effects(self.rows, self.policy.effect_block):
            effect[part.start : part.stop] = nats
        self.signals = replace(self.signals, effect=effect)

    # -- agreement -----------------------------------------------------------------------------------------------------

    def _values(self, runs: Sequence[Run]) -> dict[Run, torch.Tensor]:
        """Returns copies of the value rows of S in the runs, `[L, T, H, D]` each."""
        parts = [part for run in self.context.diff.suffix for part in clip_runs(runs, run.new_start, run.new_stop)]
        return {part: self.runtime.rows(self.blocks, *part)[:, 1] for part in parts}

    def _compare(self) -> None:
        """Compares the rows that were just computed with what stood there before."""
        found = self.signals.agreement
        agreement = np.full(self.stop, np.nan, dtype=np.float32) if found is None else found.copy()
        for part in [part for part in self._stale if any(a <= part.start < b for a, b in self._fresh)]:
            old = self._stale.pop(part).float()
            new = self.runtime.rows(self.blocks, *part)[:, 1].float()
            cosine = torch.nn.functional.cosine_similarity(old.flatten(2), new.flatten(2), dim=-1).mean(0)
            mean = self.runtime.mean_over_ranks(cosine.cpu(), len(cosine))
            assert mean is not None
            agreement[part.start : part.stop] = mean.numpy()
        self._fresh = []
        self.signals = replace(self.signals, agreement=agreement)

    # -- mean shift ----------------------------------------------------------------------------------------------------

    def _repair_shifted(self, pending: list[Segment], chosen: list[Run]) -> None:
        """Computes pending and chosen rows in one forward that shifts the other rows of S at each layer as it goes."""
        merged = merge_runs([*(Run(s.start, s.stop) for s in pending), *chosen, *self._again(chosen)])
        batch = [Segment(self.order.token_ids, self.blocks, a, b) for a, b in merged]
        if not batch:
            return
        limit = self.runtime.segments
        if run_tokens(merged) > limit.max_tokens or len(batch) > limit.max_runs:
            raise ValueError(
                f"the mean shift computes its {run_tokens(merged)} rows in {len(batch)} runs at once, and the engine takes "
                f"{limit.max_tokens} rows (max_num_batched_tokens) in {limit.max_runs} runs (max_num_seqs) at most"
            )
        chunks = [*self._chunks(chosen)]
        shift_means(self.runtime, self.policy, self.blocks, batch, chunks, self.signals)

    def _chunks(self, chosen: list[Run]) -> Iterator[tuple[Run, list[Run], list[Run]]]:
        """Yields each aligned run of S that is loaded, its chosen rows, and its rows that stay."""
        for run in self.context.diff.suffix:
            rows = [*clip_runs(self.online.rows, run.new_start, run.new_stop)]
            kept = [r for a, b in rows for r in complement([*chosen, *self.planned], b, a)]
            probes = [*clip_runs(chosen, run.new_start, run.new_stop)]
            if rows:
                yield Run(rows[0].start, rows[-1].stop), probes, kept
