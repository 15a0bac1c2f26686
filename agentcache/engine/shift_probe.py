"""How much of the error of reused chunks one offset explains (AgentKVShift), measured on an idle engine.

```
fresh    [ instruction ][ chunk 2 ][ chunk 1 ][ question ]   exact prefill of the prompt
reused   each chunk encoded alone, stored, restored at its new place; keys turned
shifted  the same pages after `mean_shift` has computed its probes and moved the other rows
```

The policy runs as in a request: the same plan, the same choice, the same forward (`engine.online`), in pages that no request holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from agentcache.engine.drift_probe import prefill
from agentcache.engine.loads import online_order
from agentcache.engine.online import OnlineRepair
from agentcache.engine.orders import LoadOrder, LoadReport
from agentcache.engine.planning import Planned
from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.engine.selfcheck import Scratch
from agentcache.engine.state import Load
from agentcache.episodes.diff import find_spans
from agentcache.errors import AgentCacheError
from agentcache.kernels import Tag
from agentcache.recovery import PolicyContext, get_policy, plan
from agentcache.recovery.base import OnlinePolicy
from agentcache.store.compose import GAP
from agentcache.store.extents import LoadExtent
from agentcache.store.payloads import PayloadStore
from agentcache.types import AlignedRun, PromptDiff, Run, clip_runs, complement, run_tokens

__all__ = ["measure_shift"]

_SUMS = ("norm", "residual", "left", "without_probes", "without_common")


@torch.inference_mode()
def measure_shift(
    runtime: Runtime,
    num_blocks: int,
    prompt_ids: Sequence[int],
    chunks: Sequence[Sequence[int]],
    *,
    options: Mapping[str, Any] | None = None,
    tag: str = Tag.EXACT,
) -> dict[str, Any]:
    """Returns, layer by layer, how far a prompt's reused rows are from exact ones before and after the shift; overwrites pages.

    Only rows that `mean_shift` keeps count: probes are fresh in any case.

    Args:
        runtime: The rank's pages, rotation and segment forward.
        num_blocks: Pages of the KV cache.
        prompt_ids: The prompt.
        chunks: Ids of the chunks that stand in it, in any order; each is encoded alone.
        options: Of `mean_shift`.
        tag: How the chunks are stored.

    Returns:
        `probes` and `kept`: tokens of the chunks that were recomputed and that were not. For `key` and `value`, sums over the
        kept rows by layer, `[L]` each: `norm`: ‖fresh‖²; `residual`: ‖fresh − reused‖²; `left`: ‖fresh − shifted‖²; and with
        one offset a chunk, not weighted by row: `without_probes`: ‖fresh − reused − p̄‖², p̄ the mean residual of the chunk's
        probes; `without_common`: ‖fresh − reused − r̄‖², r̄ that of its kept rows, the best there is.

    Raises:
        ValueError: Nothing of the chunks stands in the prompt, or the KV cache is too small.
        AgentCacheError: The policy could not choose.
    """
    policy = get_policy("mean_shift", options or {})
    assert isinstance(policy, OnlinePolicy)
    scratch = Scratch(runtime, num_blocks)
    exact = scratch.table(len(prompt_ids))
    prefill(runtime, prompt_ids, exact)
    store, starts = _encode(runtime, scratch, chunks, tag)
    context = PolicyContext(_diff(chunks, prompt_ids), np.asarray(prompt_ids, dtype=np.int32))
    made = plan(policy, context, parent_exact_end=0, limit=len(prompt_ids) - 1)
    if not made.restore:
        raise ValueError("nothing of the chunks stands in the prompt: there is nothing to shift")
    extents = [_extent(starts, run) for run in made.restore]
    table = scratch.table(len(prompt_ids))
    runtime.restore(store, extents, table)
    reused = runtime.rows(table, 0, made.load_end).cpu()

    online = online_order(Planned(made, 0, None, policy, context), Load(0, extents, made.recompute), list(prompt_ids))
    ids = list(prompt_ids[: made.load_end])
    order = LoadOrder("probe", ("", "probe"), ids, table.tolist(), 0, extents, [*made.recompute], False, online)
    report = LoadReport()
    repair = OnlineRepair(runtime, order, table, (), report)
    left = repair.advance([Segment(ids, table, *run) for run in made.recompute])
    while left:
        runtime.segments.run(left)
        left = repair.advance(())
    if report.fault is not None:
        raise AgentCacheError(report.fault)

    fresh, shifted = (runtime.rows(each, 0, made.load_end).cpu() for each in (exact, table))
    sums = torch.zeros(2, len(_SUMS), len(runtime.pages), dtype=torch.float64)
    kept = 0
    for chunk in made.restore:
        probes = _rows([*clip_runs(report.repaired, chunk.new_start, chunk.new_stop)])
        rows = _rows(complement(report.repaired, chunk.new_stop, chunk.new_start))
        if len(rows):
            kept += len(rows)
            sums += _sums(fresh, reused, shifted, rows, probes)
    mean = runtime.mean_over_ranks(sums.flatten().float(), sums.numel())
    assert mean is not None
    by_layer = mean.view(sums.shape).tolist()
    out: dict[str, Any] = {"probes": run_tokens(_within(report.repaired, made.restore)), "kept": kept}
    for name, side in zip(("key", "value"), by_layer, strict=True):
        out[name] = {what: [float(f"{x:.6g}") for x in line] for what, line in zip(_SUMS, side, strict=True)}
    return out


def _encode(
    runtime: Runtime, scratch: Scratch, chunks: Sequence[Sequence[int]], tag: str
) -> tuple[PayloadStore, list[int]]:
    """Returns the chunks, each encoded alone, as objects; and where each begins when they stand in a row with gaps."""
    store = PayloadStore()
    table = scratch.table(max(map(len, chunks), default=1))
    for number, ids in enumerate(chunks):
        prefill(runtime, ids, table)
        store.put(number, runtime.gather(table, 0, len(ids), tag))
    return store, [0, *accumulate(len(ids) + 1 for ids in chunks)][:-1]


def _diff(chunks: Sequence[Sequence[int]], prompt_ids: Sequence[int]) -> PromptDiff:
    """Returns where the chunks, in a row with gaps, stand in the prompt."""
    row = [token for ids in chunks for token in (*ids, GAP)][:-1]
    return PromptDiff(len(row), len(prompt_ids), find_spans(row, prompt_ids, [Run(0, len(prompt_ids))]))


def _extent(starts: Sequence[int], run: AlignedRun) -> LoadExtent:
    """Returns the rows of one chunk's object, which begins at position 0."""
    number = bisect_right(starts, run.old_start) - 1
    offset = run.old_start - starts[number]
    return LoadExtent(number, offset, run.length, run.new_start, run.new_start - offset)


def _within(runs: Sequence[Run], spans: Sequence[AlignedRun]) -> Iterator[Run]:
    for span in spans:
        yield from clip_runs(runs, span.new_start, span.new_stop)


def _rows(runs: Sequence[Run]) -> torch.Tensor:
    return torch.tensor([row for run in runs for row in range(*run)], dtype=torch.int64)


def _sums(
    fresh: torch.Tensor, reused: torch.Tensor, shifted: torch.Tensor, rows: torch.Tensor, probes: torch.Tensor
) -> torch.Tensor:
    """Returns `_SUMS` of one chunk, float64 `[2, 5, L]`.

    Args:
        fresh: Exact rows of the prompt `[L, 2, T, H, D]`.
        reused: As they were restored.
        shifted: As the policy leaves them.
        rows: Of the chunk, that were kept.
        probes: Of the chunk, that were recomputed.
    """
    exact, old, moved = (part[:, :, rows].double() for part in (fresh, reused, shifted))
    residual = exact - old
    offset = torch.zeros(())
    if len(probes):
        offset = (fresh[:, :, probes].double() - reused[:, :, probes].double()).mean(2, keepdim=True)
    parts = (exact, residual, exact - moved, residual - offset, residual - residual.mean(2, keepdim=True))
    return torch.stack([part.square().sum((2, 3, 4)) for part in parts]).permute(2, 0, 1)
