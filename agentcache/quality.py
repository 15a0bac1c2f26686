"""How far an approximate next-token distribution is from the exact one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = ["kl_divergence", "top1_agrees"]


def kl_divergence(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Returns KL(exact ‖ other) in nats of two whole distributions given as log-probabilities by token id.

    Raises:
        ValueError: They are over different tokens, e.g. because only the top ones were asked for.
    """
    if exact.keys() != other.keys():
        raise ValueError(
            f"the distributions are over {len(exact)} and {len(other)} tokens; ask for logprobs=-1, the whole vocabulary"
        )
    order = sorted(exact)
    p, q = (np.array([d[t] for t in order], dtype=np.float64) for d in (exact, other))
    carries = np.exp(p) > 0  # a token of no mass adds nothing, whatever its log-probability is on the other side
    return max(0.0, float(np.sum(np.exp(p[carries]) * (p[carries] - q[carries]))))


def top1_agrees(exact: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether both distributions have the same most likely token."""
    return max(exact, key=exact.__getitem__) == max(other, key=other.__getitem__)
