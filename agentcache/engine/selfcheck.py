"""Proof on an idle engine that recovery is right for its model: numbers for `agentcache doctor` and for the model tests.

It computes in pages that no request holds, so it runs only while the engine is idle, and the caller resets vLLM's prefix
cache afterwards: hashes of those pages are no longer true.
"""

from __future__ import annotations

from typing import Any

import torch

from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.store.extents import LoadExtent
from agentcache.store.payloads import PayloadStore
from agentcache.types import Run, complement

__all__ = ["Scratch", "check_recovery"]

_RUN = 8  # rows a segment


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the largest difference relative to the largest wanted value."""
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-30))


class Scratch:
    """Block tables at the end of an idle engine's KV cache, one below the other.

    Args:
        runtime: The rank's.
        num_blocks: Pages of the KV cache.
    """

    def __init__(self, runtime: Runtime, num_blocks: int) -> None:
        self.runtime = runtime
        self.next = num_blocks

    def table(self, tokens: int) -> torch.Tensor:
        """Returns an int64 block table with room for `tokens` rows that overlaps with none before.

        Raises:
            ValueError: The KV cache is used up.
        """
        count = -(-tokens // self.runtime.block_size)
        self.next -= count
        if self.next < 1:
            raise ValueError(
                f"the KV cache is too small to measure in: {count} more blocks are needed; give the engine more kv_bytes"
            )
        return torch.arange(self.next, self.next + count, dtype=torch.int64)


@torch.inference_mode()
def check_recovery(
    runtime: Runtime, model: Any, num_blocks: int, old_ids: list[int], new_ids: list[int], prefix: int, suffix: int
) -> dict[str, float]:
    """Returns the errors of a recovery against a full prefill, each relative to the largest value.

    Args:
        runtime: The rank's pages, rotation and segment forward.
        model: The engine's model, for logits.
        num_blocks: Pages of the KV cache; the last ones are overwritten.
        old_ids: A prompt.
        new_ids: The prompt after an edit in its middle; longer or shorter.
        prefix: Common leading tokens.
        suffix: Common trailing tokens.

    Returns:
        `kv` and `logits`: the whole suffix recomputed in runs of 8 over shifted stale rows. `moved_keys`: layer 0's keys
        restored and rotated. `stale_kv`, `stale_logits`: the suffix left unrepaired, to show that the check can fail.
    """
    assert old_ids[:prefix] == new_ids[:prefix] and old_ids[-suffix:] == new_ids[-suffix:]
    scratch = Scratch(runtime, num_blocks)
    store = PayloadStore()

    def prefill(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        table = scratch.table(len(ids))
        hidden = None
        for batch in runtime.segments.batches([Segment(ids, table, 0, len(ids))]):
            hidden = runtime.segments.forward(batch)
        assert hidden is not None
        return table, model.compute_logits(hidden[-1:])

    fresh_table, fresh_logits = prefill(new_ids)
    old_table, _ = prefill(old_ids)
    fresh = runtime.rows(fresh_table, 0, len(new_ids))
    store.put(0, runtime.gather(old_table, 0, len(old_ids)))
    start, shift = len(new_ids) - suffix, len(new_ids) - len(old_ids)
    extents = [
        LoadExtent(0, 0, prefix, 0, 0),
        LoadExtent(0, len(old_ids) - suffix, suffix, start, shift),
    ]

    def recovered(runs: list[Run]) -> tuple[torch.Tensor, torch.Tensor]:
        table = scratch.table(len(new_ids))
        runtime.restore(store, extents, table)
        hidden = None
        for batch in runtime.segments.batches(Segment(new_ids, table, a, b) for a, b in runs):
            hidden = runtime.segments.forward(batch)
        assert hidden is not None
        return runtime.rows(table, 0, len(new_ids)), model.compute_logits(hidden[-1:])

    small = [Run(a, min(a + _RUN, len(new_ids))) for a in range(prefix, len(new_ids), _RUN)]
    rows, logits = recovered(small)
    middle = list(complement([(0, prefix), (start, len(new_ids))], len(new_ids)))
    stale_rows, stale_logits = recovered([*middle, Run(len(new_ids) - 1, len(new_ids))])
    stale = slice(start, len(new_ids) - 1)
    return {
        "kv": max(_error(rows[layer], fresh[layer]) for layer in range(len(fresh))),
        "logits": _error(logits, fresh_logits),
        "moved_keys": _error(stale_rows[0, 0, stale], fresh[0, 0, stale]),
        "stale_kv": max(_error(stale_rows[layer][:, stale], fresh[layer][:, stale]) for layer in range(len(fresh))),
        "stale_logits": _error(stale_logits, fresh_logits),
    }
