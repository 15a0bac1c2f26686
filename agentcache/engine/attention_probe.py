"""How much each row of a finished request was attended to, read off the engine without changing its pages.

The last rows of the prompt and of the reply run through vLLM's model once more as a segment forward whose slots are all -1:
backends skip such rows when they write K/V, and the pages hold these rows already. Hooks on a few attention layers see the
rotated queries; the forward ends at the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.attention import Attention

from agentcache.engine.hooks import forward_until, run_order
from agentcache.engine.segments import Segment, SegmentForward
from agentcache.types import Run, merge_runs

__all__ = [
    "ASKING_ROWS",
    "QUERY_TOKENS",
    "SAMPLED_LAYERS",
    "AttentionProbe",
    "Queries",
    "query_layers",
    "query_runs",
    "sampled_layers",
]

QUERY_TOKENS = 32
"""Rows at the end of the prompt that are asked what they attend to (formulas 10), and as many at the end of the reply, whose
rows no query of the prompt can see."""

ASKING_ROWS = 8
"""Last rows of a new query whose attention counts: they have read the question, see `query_layers`."""

SAMPLED_LAYERS = 4
"""On 17 prompts of MuSiQue passages (930 to 7,941 tokens, SmolLM2-135M with 30 layers) the block risks of these four have a
rank correlation of 0.97 with those of all layers and name 94 % of the riskiest 5 % of the blocks; two layers 0.94 and the same
share, eight 0.98 and 98 %. Four late layers alone correlate by 0.4 only (6 prompts), so they are spread."""


def sampled_layers(layers: int) -> list[int]:
    """Returns the layers whose attention is measured: `SAMPLED_LAYERS`, evenly spread over the depth."""
    count = min(SAMPLED_LAYERS, layers)
    return [int((i + 0.5) * layers / count) for i in range(count)]


def query_layers(layers: int) -> list[int]:
    """Returns the layers in which a new query is asked what it attends to: four, spread over the second half of the depth.

    A lead (docs/policies.md): margin recovery of 64 tokens in blocks of 8 on derived items at d = 250 (Qwen2.5-Coder-1.5B, 28 layers; 6 with one table, 5
    with three that compete): all layers 0.99 and 0.93, four spread over the whole depth 0.99 and 0.33, these four 0.99 and
    0.98, these four asked by the last `ASKING_ROWS` rows alone 0.99 and 0.99.
    """
    count = min(SAMPLED_LAYERS, layers)
    return sorted({layers * (3 + i) // 7 for i in range(count)})


def query_runs(prompt_tokens: int, tokens: int) -> tuple[Run, ...]:
    """Returns the rows that are asked: the last ones of the prompt and, when there is a reply, its last ones.

    Args:
        prompt_tokens: Rows of the prompt.
        tokens: All rows.
    """
    prompt = min(prompt_tokens, tokens)
    tails = [Run(max(start, stop - QUERY_TOKENS), stop) for start, stop in ((0, prompt), (prompt, tokens))]
    return merge_runs(tail for tail in tails if tail.start < tail.stop)


@dataclass(frozen=True, slots=True)
class Queries:
    """Rotated queries of the sampled layers.

    Attributes:
        layers: One `[Q, Hq, D]` a sampled layer.
        positions: int64 `[Q]`.
    """

    layers: list[torch.Tensor]
    positions: torch.Tensor


class AttentionProbe:
    """Captures queries.

    Args:
        segments: The engine's segment forward.
        layers: The attention modules to look at, in the order in which the model runs them.
    """

    def __init__(self, segments: SegmentForward, layers: Sequence[Attention]) -> None:
        self.segments = segments
        self.layers = list(layers)

    def capture(self, token_ids: Sequence[int], block_ids: torch.Tensor, runs: Sequence[Run]) -> Queries:
        """Returns the queries of rows whose K/V stand in the pages already; writes nothing there.

        Args:
            token_ids: The request's ids.
            block_ids: int64 block table of the request.
            runs: Ascending and disjoint.
        """
        caught: list[list[torch.Tensor]] = [[] for _ in self.layers]
        positions: list[int] = []
        for batch in self.segments.batches(Segment(token_ids, block_ids, *run) for run in runs):
            ordered = [batch[at] for at in run_order(batch)]
            positions += [at for run in ordered for at in range(run.start, run.stop)]
            forward_until(
                self.segments, ordered, self.layers, lambda at, seen: caught[at].append(seen.q.clone()), write=False
            )
        return Queries([torch.cat(pieces) for pieces in caught], torch.tensor(positions, dtype=torch.int64))
