"""How far behind an edit the rows are dirty, as a function of three lengths: formulas 8 of PatchKV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentcache.errors import ConfigError

__all__ = ["FEATURES", "LengthModel", "length_features"]

FEATURES = ("1", "p", "m", "s", "pm", "ps", "ms")
"""phi: an intercept, `p = log1p|P|`, `m = log1p|M_new|`, `s = log1p|S|`, and their products (**choice**, formulas 8)."""


def length_features(prefix: ArrayLike, middle: ArrayLike, suffix: ArrayLike) -> NDArray[np.float64]:
    """Returns phi of training pairs or edits, float64 `[..., 7]` in the order of `FEATURES`.

    Args:
        prefix: |P| of each, `[...]`.
        middle: |M_new| of each.
        suffix: |S| of each.
    """
    p, m, s = (np.log1p(np.asarray(length, dtype=np.float64)) for length in (prefix, middle, suffix))
    return np.stack([np.ones_like(p), p, m, s, p * m, p * s, m * s], axis=-1)


@dataclass(frozen=True)
class LengthModel:
    """The fitted length model: `log1p q̂ = φ·β`, a high quantile of the oracle boundary d*.

    Attributes:
        coefficients: Beta, in the order of `FEATURES`.
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.coefficients) != len(FEATURES) or not all(math.isfinite(value) for value in self.coefficients):
            raise ConfigError(
                f"a length model of {self.coefficients} is not allowed; take {len(FEATURES)} finite coefficients, of "
                + ", ".join(FEATURES)
            )

    def windows(self, prefix: ArrayLike, middle: ArrayLike, suffix: ArrayLike) -> NDArray[np.int64]:
        """Returns how many rows behind each edit lie at a distance below `min(|S|, q̂)` (formulas 9), int64 `[...]`."""
        with np.errstate(over="ignore"):  # beyond |S| in any case
            log_length = length_features(prefix, middle, suffix) @ np.array(self.coefficients)
        most = np.asarray(suffix, dtype=np.int64)
        # Rounded first: a length that is whole but for its last bits takes no further row.
        rows: NDArray[Any] = np.ceil(np.round(np.expm1(np.clip(log_length, 0.0, np.log1p(most))), 6))
        return np.minimum(rows.astype(np.int64), most)

    @classmethod
    def from_text(cls, text: str) -> LengthModel:
        """Returns the model of a policy's option, `"1.5, 0.2, …"`.

        Raises:
            ConfigError: It is not seven finite numbers.
        """
        try:
            return cls(tuple(float(part) for part in text.split(",")))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"length_model={text!r} is not allowed; take {len(FEATURES)} numbers with commas"
            ) from None

    def to_text(self) -> str:
        """Returns the model as a policy's option; `from_text` gives it back."""
        return ",".join(repr(float(value)) for value in self.coefficients)
