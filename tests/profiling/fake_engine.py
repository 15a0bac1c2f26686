"""An engine that measures nothing: its numbers follow from the ids alone, and look like those of a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentcache.episodes.diff import diff_tokens
from agentcache.profiling.fit import EDGES
from agentcache.recovery import PolicyContext, get_policy, plan

LAYERS = [1, 3]


class FakeEngine:
    """Stands in for an `AgentCache`.

    Args:
        before: Is called before each measurement, e.g. to interrupt the run.
    """

    def __init__(self, before: Callable[[int], object] = lambda _: None) -> None:
        self.before = before
        self.measured: list[dict[str, Any]] = []

    def profile_pair(self, old_ids: Sequence[int], new_ids: Sequence[int], **wanted: Any) -> dict[str, Any]:
        self.before(len(self.measured))
        self.measured.append(wanted)
        rng = np.random.default_rng(zlib.crc32(np.array([*old_ids, *new_ids]).tobytes()))
        diff = diff_tokens(old_ids, new_ids)
        run = diff.suffix[-1]
        before = diff.suffix[-2].new_stop if len(diff.suffix) > 1 else diff.prefix
        blocks = -(-run.length // 32)
        old_blocks = -(-len(old_ids) // 32)
        deviation = 0.04 * np.exp(-np.arange(blocks) / 2) * rng.uniform(0.5, 2, blocks) + 0.001
        bins = int(np.searchsorted(EDGES, run.length))
        attention = rng.random(len(new_ids)).astype(np.float32)
        context = PolicyContext(diff, np.asarray(new_ids), attention=attention)
        return {
            "lengths": {"prefix": diff.prefix, "old": len(old_ids), "new": len(new_ids), "suffix": run.length},
            "layers": LAYERS,
            "last": {
                "prefix": before,
                "middle": run.new_start - before,
                "suffix": run.length,
                "deviation": deviation.tolist(),
            },
            "curve": {
                "from": list(EDGES[:bins]),
                "tokens": [10] * bins,
                "value": [[0.04 / (1 + at), 0.05 / (1 + at)] for at in range(bins)],
                "key": [[0.01 / (1 + at), 0.02 / (1 + at)] for at in range(bins)],
            },
            "stored": {
                name: rng.random(old_blocks).tolist() for name in ("attention", "residual", "risk_max", "risk_mean")
            },
            "placed": {
                "block": 16,
                "attention": np.maximum.reduceat(attention, np.arange(0, len(new_ids), 16)).tolist(),
            },
            "arms": [self._arm(context, *arm, rng) for arm in wanted["arms"]],
            "precisions": [
                {**how, "bytes": 0.3 + at / 40, "kl": 0.01 / (1 + at)} for at, how in enumerate(wanted["precisions"])
            ],
            "blocks": [
                {"start": 32 * at, "risk": 0.01 * at, "residual": 0.1, "kl": 0.001 * at}
                for at in range(wanted["blocks"])
            ],
        }

    def _arm(
        self, context: PolicyContext, name: str, options: dict[str, Any], rng: np.random.Generator
    ) -> dict[str, Any]:
        old, new = context.diff.old_len, context.diff.new_len
        made = plan(get_policy(name, options), context, parent_exact_end=old, limit=new - 1)
        ratio = 1 - made.reused_tokens / sum(run.length for run in context.diff.suffix)
        return {
            "policy": name,
            "options": options,
            "recompute": [list(run) for run in made.recompute],
            "repaired": made.repair_tokens,
            "reused": made.reused_tokens,
            "computed": made.repair_tokens + made.fresh_tokens,
            "ratio": ratio,
            "first_token_ms": rng.random(),
            "kl": 0.05 * (1 - ratio) ** 2,
            "top1": 1.0,
            "gap": 0.0,
        }
