"""Scores in [0, 1] as one byte each, on a logarithmic scale: attention is spread over five decades.

Code 0 is 0; code c from 1 is 2^((c - 255) / 15): a step is 4.7 %, the smallest score 9e-6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Codes", "decode_scores", "encode_scores"]

Codes = np.ndarray[Any, np.dtype[np.uint8]]
"""Scores of rows, `[T]`, as bytes."""

_STEPS = 15.0  # codes an octave
_TABLE = np.concatenate(([0.0], np.exp2((np.arange(1, 256) - 255) / _STEPS))).astype(np.float32)


def encode_scores(scores: ArrayLike) -> Codes:
    """Returns scores as codes, uint8 of the same shape; what lies outside [0, 1] is clipped, NaN counts as 1.

    Args:
        scores: Any shape.
    """
    with np.errstate(divide="ignore"):  # 0 becomes -inf, and that code 0
        exponent = np.log2(np.clip(np.nan_to_num(np.asarray(scores, dtype=np.float32), nan=1.0), 0.0, 1.0))
    codes = np.rint(255 + _STEPS * exponent)
    return np.clip(codes, 0, 255).astype(np.uint8)


def decode_scores(codes: ArrayLike) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the scores of codes, float32 of the same shape."""
    return _TABLE[np.asarray(codes, dtype=np.uint8)]
