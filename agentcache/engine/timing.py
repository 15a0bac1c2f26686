"""Times the parts of a resume on this rank, once, at start-up: what `engine.costs` is fitted to.

Everything happens in the null block, which no request reads, so it may run on an engine in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from agentcache.engine.costs import Sample, work_of
from agentcache.engine.precision import MIXED
from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.kernels import Tag
from agentcache.store.extents import OBJECT_TOKENS, LoadExtent
from agentcache.store.payloads import PayloadStore

__all__ = ["time_runtime"]

_TOKEN: Final = 5  # any ordinary token
_REPS: Final = 3
_FORWARDS: Final = ((4, 0), (64, 0), (64, 2048), (256, 0), (8, 4096), (256, 2048), (640, 0))  # (rows, rows before them)
_FIRST: Final = 3  # forwards that are timed on every machine, however slow
_OBJECTS: Final = ((16, 1), (16, 16), (OBJECT_TOKENS, 1), (OBJECT_TOKENS, 8))  # (rows of an object, objects)


def time_runtime(runtime: Runtime, precision: str, budget_s: float = 1.2) -> list[Sample]:
    """Returns timed restores and forwards, the small ones first; leaves every page but the null block as it is.

    All ranks time the same pieces: what does not fit in the budget on one of them ends it for all.

    Args:
        runtime: The rank's pages and segment forward.
        precision: How the connector stores rows.
        budget_s: About how long it may take.
    """
    deadline = time.perf_counter() + budget_s
    samples = [
        Sample("restore", rows * objects, objects, _least_s(runtime, run))
        for rows, objects, run in _restores(runtime, precision)
    ]
    for at, (rows, context) in enumerate(_forwards(runtime)):
        expected = _REPS * samples[-1].seconds * max(rows / samples[-1].rows, 1) if at >= _FIRST else 0.0
        if not runtime.all_ranks([time.perf_counter() + expected < deadline or at < _FIRST])[0]:
            break
        stop = context + rows
        segment = Segment([_TOKEN] * stop, _null_table(runtime, stop), context, stop)
        work = work_of([(context, stop)])
        seconds = _least_s(runtime, partial(runtime.segments.forward, [segment]))
        samples.append(Sample("forward", work.tokens, work.pairs, seconds))
    runtime.clear_null_block()
    return samples


def _forwards(runtime: Runtime) -> Iterator[tuple[int, int]]:
    """Yields rows and context of the forwards to time, as far as the engine's limits allow them."""
    longest = int(runtime.segments.vllm_config.model_config.max_model_len)
    for rows, context in _FORWARDS:
        rows = min(rows, runtime.segments.max_tokens, longest)
        yield rows, min(context, longest - rows)


def _restores(runtime: Runtime, precision: str) -> Iterator[tuple[int, int, Callable[[], object]]]:
    """Yields rows of an object, objects, and what restores them as a load does: compared with their checksums, keys turned."""
    tag = Tag.K8V8 if precision == MIXED else precision
    for rows, objects in _OBJECTS:
        table = _null_table(runtime, rows * objects + 1)
        store = PayloadStore()
        for number in range(objects):
            store.put(number, runtime.gather(table, 0, rows, tag))
        extents = [LoadExtent(number, 0, rows, number * rows, 1) for number in range(objects)]

        def run(store: PayloadStore = store, extents: list[LoadExtent] = extents, table: Any = table) -> None:
            assert all(store.intact(extent.object_id) for extent in extents)
            runtime.restore(store, extents, table)

        yield rows, objects, run


def _null_table(runtime: Runtime, rows: int) -> torch.Tensor:
    """Returns a block table that has the null block in every place."""
    return torch.zeros(-(-rows // runtime.block_size), dtype=torch.int64)


def _least_s(runtime: Runtime, run: Callable[[], object]) -> float:
    """Returns the least seconds of a few runs: what else the machine does only adds to them."""
    times = []
    for _ in range(_REPS):
        started = time.perf_counter()
        run()
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
        times.append(time.perf_counter() - started)
    return min(times)
