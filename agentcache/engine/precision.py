"""Mixed precision: which block of a checkpoint is stored how (PatchKV, risk and precision tags; formulas 10, 13, 14).

```
A_i  attention on row i, over the largest of all rows but the sinks          [0, 1]
e_i  what 4 bits would lose of row i's values, relative                       [0, 1]
r_i = A_i e_i        r_b = alpha max r_i + (1 - alpha) mean r_i               over the rows of block b

r_b >= tau_high               exact
r_b >= tau_low                k8v8
else, if the block passes     k8v4          (max e_i <= low_bit_residual), else k8v8
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from agentcache.kernels import BLOCK, COMPARISON, Source, Tag

__all__ = [
    "ALPHA",
    "EXACT_RISK",
    "LOW_BIT_RESIDUAL",
    "LOW_RISK",
    "MIXED",
    "SINK_TOKENS",
    "Thresholds",
    "block_risk",
    "block_tags",
    "known_precisions",
    "normalised_attention",
    "tagged_sources",
]

MIXED = "mixed"
"""The setting that measures each block and tags it."""

SINK_TOKENS = 4
"""First rows, which draw attention whatever they hold: they do not set the scale of the others."""

ALPHA = 0.5
"""How much of a block's risk is that of its riskiest row; ours."""

EXACT_RISK = 0.03
LOW_RISK = 0.02
"""Chosen on 20 prompts of MuSiQue passages (about 2,200 tokens, ten prompts a pair, SmolLM2-135M in bfloat16): of eight pairs
from (0.02, 0.02) to (0.065, 0.015) the KL to the exact cache's next token was 0.0014 to 0.0023 (`k8v8` alone 0.0015, `k8v4` alone 0.0047), at 0.41 to
0.45 of the bytes. This pair has the lowest at 0.42. `docs/checkpoint-format.md` has what it does on other text."""

LOW_BIT_RESIDUAL = 0.15
"""Four bits are calibrated for rows that lose less than this: on MuSiQue and HotpotQA passages the worst row loses 0.122 with
SmolLM2-135M and 0.144 with Qwen2.5-Coder-1.5B (medians 0.10)."""

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What is calibrated for a model; the defaults are SmolLM2's.

    Attributes:
        tau_low: Blocks of less risk may be stored as `k8v4`.
        tau_high: Blocks of this risk and more are stored exactly.
        alpha: How much of a block's risk is that of its riskiest row.
        low_bit_residual: Most that 4 bits may lose of a row of a `k8v4` block.
    """

    tau_low: float = LOW_RISK
    tau_high: float = EXACT_RISK
    alpha: float = ALPHA
    low_bit_residual: float = LOW_BIT_RESIDUAL


_DEFAULT = Thresholds()


def known_precisions() -> frozenset[str]:
    """Returns every name that `ConnectorConfig.precision` and `ResumeParams.precision` may have."""
    return frozenset({*map(str, Tag), *COMPARISON, MIXED})


def normalised_attention(mass: ArrayLike) -> Floats:
    """Returns I (and A) of formulas 10: attention over the largest one of a row that is no sink, at most 1, float32 `[T]`.

    Args:
        mass: Mean attention on each row of a version, `[T]`.
    """
    rows: Floats = np.asarray(mass, dtype=np.float32)
    # A version of sinks alone has no other scale than theirs.
    top = (rows[SINK_TOKENS:] if len(rows) > SINK_TOKENS else rows).max(initial=0.0)
    if top <= 0:
        return np.zeros_like(rows)
    scores: Floats = (rows / top).clip(max=1.0)
    return scores


def block_risk(attention: ArrayLike, residual: ArrayLike, alpha: float = ALPHA) -> Floats:
    """Returns r_b of each block of `BLOCK` rows, float32 `[ceil(N / BLOCK)]` (PatchKV, risk; formulas 13).

    Args:
        attention: A of each row, `[N]`.
        residual: e^V of each row, `[N]`.
        alpha: Weight of the riskiest row.
    """
    risk: Floats = np.asarray(attention, dtype=np.float32) * np.asarray(residual, dtype=np.float32)
    starts = np.arange(0, len(risk), BLOCK)
    counts = np.minimum(BLOCK, len(risk) - starts)
    mean = np.add.reduceat(risk, starts) / counts
    blocks: Floats = (alpha * np.maximum.reduceat(risk, starts) + (1 - alpha) * mean).astype(np.float32)
    return blocks


def block_tags(attention: ArrayLike, residual: ArrayLike, thresholds: Thresholds = _DEFAULT) -> list[Tag]:
    """Returns the precision of each block of `BLOCK` rows (PatchKV, block policy; formulas 14). NaN counts as the highest risk.

    Args:
        attention: A of each row, `[N]`.
        residual: e^V of each row, `[N]`.
        thresholds: Of the model.
    """
    residual = np.asarray(residual, dtype=np.float32)
    risk = np.nan_to_num(block_risk(attention, residual, thresholds.alpha), nan=np.inf)
    worst = np.maximum.reduceat(residual, np.arange(0, len(residual), BLOCK))
    four = (risk < thresholds.tau_low) & (worst <= thresholds.low_bit_residual)
    high = thresholds.tau_high
    return [Tag.EXACT if r >= high else Tag.K8V4 if low else Tag.K8V8 for r, low in zip(risk, four, strict=True)]


def tagged_sources(start: int, stop: int, tags: list[Tag]) -> Iterator[Source]:
    """Yields rows `[start, stop)` as runs of one precision each.

    Args:
        start: First row, where the first block begins.
        stop: Row after the last.
        tags: One a block of `BLOCK` rows.
    """
    at = start
    for tag, run in groupby(tags):
        end = min(at + BLOCK * sum(1 for _ in run), stop)
        yield Source(at, end - at, tag)
        at = end
    assert at == stop
