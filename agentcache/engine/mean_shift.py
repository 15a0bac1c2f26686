"""AgentKVShift's correction in the worker: at each layer, rows that stay get the mean deviation of the rows that are recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentcache.engine.hooks import Seen, run_order, watch
from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.recovery.base import OnlinePolicy, Signals
from agentcache.recovery.rows import Indices, Scores, share_of
from agentcache.types import Run

__all__ = ["probe_set", "shift_means"]

Chunk = tuple[Run, list[Run], list[Run]]


def probe_set(deviation: Scores, chosen: Indices, count: int) -> Indices:
    """Returns the `count` chosen rows that deviate most, ascending: S_K or S_V of AgentKVShift 2.

    Args:
        deviation: d of each row.
        chosen: Rows that are recomputed.
        count: b.
    """
    return np.sort(chosen[np.argsort(-deviation[chosen], kind="stable")[:count]])


def shift_means(
    runtime: Runtime,
    policy: OnlinePolicy,
    blocks: torch.Tensor,
    batch: Sequence[Segment],
    chunks: Sequence[Chunk],
    signals: Signals,
) -> None:
    """Computes a batch; from the check layer on, adds to each chunk's other rows what its probes deviate by on average.

    ```
    S_K = the b = ⌈r·n⌉ recomputed rows of largest d_K     AgentKVShift 2, r the policy's `probe_share`
    μ̂_K = (1/b) Σ_{j∈S_K} (K_fresh,j − K_reuse,j)         AgentKVShift 3, at each layer
    K_corr,j = K_reuse,j + w_{K,j}·μ̂_K                     AgentKVShift 4, for rows that are not recomputed; the same for V
    w_j = min(d_j, 1)                                      AgentKVShift 2, fixed at the check layer: `policy.shift_weights`
    ```

    The rows are shifted in the pages before the layer's attention reads them.

    Args:
        runtime: The rank's pages and segment forward.
        policy: Its check layer is the first that is shifted; earlier ones hold fresh rows already.
        blocks: int64 block table of the request.
        batch: All rows to compute, X among them; one forward.
        chunks: Each chunk's span, its probes (recomputed rows) and the rows that stay.
        signals: With deviations of the check layer.
    """
    share = policy.probe_share
    assert share is not None and signals.key_deviation is not None and signals.value_deviation is not None
    ordered = [batch[at] for at in run_order(batch)]
    where = {row: at for at, row in enumerate(row for run in ordered for row in range(run.start, run.stop))}
    device, table, size = runtime.device, blocks.to(runtime.device), runtime.block_size
    plans = []
    for span, probes, kept in chunks:
        chosen = np.array([row for run in probes for row in range(*run)], dtype=np.int64)
        stay = np.array([row for run in kept for row in range(*run)], dtype=np.int64)
        if not len(chosen) or not len(stay):
            continue
        sides = []
        deviations = signals.key_deviation, signals.value_deviation
        for deviation, weight in zip(deviations, policy.shift_weights(signals), strict=True):
            probing = probe_set(deviation, chosen, share_of(share, len(chosen) + len(stay)))
            at = torch.tensor([where[int(row)] for row in probing], device=device)
            weights = torch.zeros(span.stop - span.start, 1, 1)
            weights[stay - span.start, 0, 0] = torch.from_numpy(weight[stay])
            sides.append((torch.from_numpy(probing - span.start).to(device), at, weights.to(device)))
        rows = torch.arange(span.start, span.stop)
        plans.append((span, sides, (blocks[rows // size] * size + rows % size).to(device)))

    def see(index: int, seen: Seen) -> None:
        pages = runtime.pages[policy.check_layer + index]
        for span, sides, slots in plans:
            moved = []
            for fresh, old, (rows, at, weights) in zip(seen[1:], pages.read(table, *span), sides, strict=True):
                mean = (fresh[at].float() - old[rows].float()).mean(0)
                moved.append(torch.addcmul(old.float(), weights, mean).to(old.dtype))
            # Also the rows that do not stay, as they are: the layer writes those itself before it reads any.
            pages.write(slots, *moved)

    with watch([pages.layer for pages in runtime.pages[policy.check_layer :]], see):
        runtime.segments.forward(ordered)
