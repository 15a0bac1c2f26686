"""Timing of the diff: what `agentcache bench diff` prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from agentcache.episodes.diff import diff_tokens
from agentcache.episodes.grams import Ints

__all__ = ["bench_diff"]


def bench_diff(tokens: int = 131_072, repeats: int = 9, seed: int = 0) -> dict[str, Any]:
    """Returns median times of diffs of a Zipf-distributed prompt, and what they found.

    Args:
        tokens: Length of the old prompt.
        repeats: Runs a case; their median counts. At least 7.
        seed: Of the prompts.

    Returns:
        `tokens`, `repeats` and `rows`, each `case, edits, diff_ms, aligned_runs, aligned_tokens, new_tokens`.
    """
    rng = np.random.default_rng(seed)
    old = rng.zipf(1.3, tokens) % 50_000
    period = np.tile(np.array([1, 2]), tokens // 2)
    shuffled = [np.array_split(old, 64)[i] for i in rng.permutation(64)]
    cases: list[tuple[str, int, Ints, Ints]] = [
        ("3 edits, new turn", 3, old, _edited(old, 3, rng)),
        ("200 edits, new turn", 200, old, _edited(old, 200, rng)),
        ("64 chunks reordered", 64, old, np.concatenate(shuffled)),
        ("period 2, 200 edits", 200, period, _edited(period, 200, rng)),
        ("unrelated", 1, old, old + 50_000),
    ]
    rows = []
    for case, edits, before, after in cases:
        diff = diff_tokens(before, after)
        rows.append(
            {
                "case": case,
                "edits": edits,
                "diff_ms": _median_ms(lambda a=before, b=after: diff_tokens(a, b), max(repeats, 7)),  # type: ignore[misc]
                "aligned_runs": len(diff.aligned),
                "aligned_tokens": sum(run.length for run in diff.aligned),
                "new_tokens": diff.new_len,
            }
        )
    return {"tokens": tokens, "repeats": max(repeats, 7), "rows": rows}


def _edited(ids: Ints, edits: int, rng: np.random.Generator) -> Ints:
    """Returns ids with that many spans of up to 64 tokens replaced by others, and a new turn of 512 tokens."""
    cuts = np.sort(rng.choice(len(ids) // 64 - 2, edits, replace=False) + 1) * 64
    pieces, at = [], 0
    for cut in cuts.tolist():
        pieces += [ids[at:cut], rng.integers(60_000, 90_000, rng.integers(0, 64))]
        at = cut + int(rng.integers(1, 48))
    return np.concatenate([*pieces, ids[at:], rng.integers(60_000, 90_000, 512)])


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)
