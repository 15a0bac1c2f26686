"""How far rows that were computed in another context are from those of a full prefill, measured on an idle engine.

```
old   [ P ][ M_old ][   S   ]   exact
new   [ P ][  M_new  ][   S   ]   exact   ->  cosine of the old and new rows of S, layer by layer, block by block
```

Everything is computed in pages that no request holds, as in `selfcheck`. The blocks that lie in P are shared by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.engine.selfcheck import Scratch
from agentcache.episodes.diff import diff_tokens
from agentcache.kernels import BLOCK

__all__ = ["measure_drift", "prefill"]

_DIGITS = 6  # decimals that are kept: below what bfloat16 tells apart


@torch.inference_mode()
def measure_drift(runtime: Runtime, num_blocks: int, old_ids: Sequence[int], new_ids: Sequence[int]) -> dict[str, Any]:
    """Returns how similar stale rows are to exact ones behind the last edit of a prompt; overwrites the last pages.

    Args:
        runtime: The rank's pages, rotation and segment forward.
        num_blocks: Pages of the KV cache.
        old_ids: A prompt.
        new_ids: The prompt after an edit that leaves something behind it.

    Returns:
        `lengths`: |P|, |M_new| and |S| of the aligned run that ends the prompt; `block`: tokens of a distance block. Mean
        cosines of that run's rows by layer and distance block, `[L, N]` each: `value`: stale values (PatchKV, formulas 5);
        `key`: stale keys after phase correction (formulas 3); `key_in_place`: stale keys without it.

    Raises:
        ValueError: Nothing is aligned behind the edit, or the KV cache is too small.
    """
    diff = diff_tokens(old_ids, new_ids)
    if not diff.suffix:
        raise ValueError("nothing of the old prompt is aligned behind the edit: there is no drift to measure")
    run = diff.suffix[-1]
    before = diff.suffix[-2].new_stop if len(diff.suffix) > 1 else diff.prefix
    scratch = Scratch(runtime, num_blocks)
    shared = diff.prefix // runtime.block_size  # blocks
    first = shared * runtime.block_size
    new = scratch.table(len(new_ids))
    prefill(runtime, new_ids, new)
    old = torch.cat((new[:shared], scratch.table(len(old_ids) - first)))
    prefill(runtime, old_ids, old, first)
    names = ("value", "key", "key_in_place")
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for pages in runtime.pages:
        stale_key, stale_value = pages.read(old.to(runtime.device), run.old_start, run.old_stop)
        key, value = pages.read(new.to(runtime.device), run.new_start, run.new_stop)
        turned = runtime.rotation.rotate(stale_key, run.shift)
        pairs = ((stale_value, value), (turned, key), (stale_key, key))
        rows = torch.stack([_cosine(*pair) for pair in pairs]).cpu()
        mean = runtime.mean_over_ranks(rows.flatten(), rows.numel())
        assert mean is not None
        for name, line in zip(names, mean.view(len(names), -1).numpy(), strict=True):
            found[name].append(_by_block(line))
    lengths = {"prefix": before, "middle": run.new_start - before, "suffix": run.length}
    return {"lengths": lengths, "block": BLOCK, **found}


def prefill(runtime: Runtime, ids: Sequence[int], table: torch.Tensor, start: int = 0) -> None:
    """Computes the rows of a prompt from `start` on into the pages of a block table; those before are there."""
    runtime.segments.run([Segment(ids, table, start, len(ids))])


def _cosine(stale: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Returns the cosine of two sets of rows `[T, H, D]` over heads and dims, float32 `[T]`."""
    return torch.cosine_similarity(stale.flatten(1).double(), exact.flatten(1).double(), dim=1).float()


def _by_block(rows: np.ndarray[Any, np.dtype[np.float32]]) -> list[float]:
    """Returns the mean of each block of rows, the first at distance 0."""
    starts = np.arange(0, len(rows), BLOCK)
    means = np.add.reduceat(rows.astype(np.float64), starts) / np.diff(starts, append=len(rows))
    return [round(float(mean), _DIGITS) for mean in means]
