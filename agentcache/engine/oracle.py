"""A full prefill inside the step, for diagnostics: what each block of the stale rows would change if it were right.

It costs the full prefill that recovery is to avoid, and one forward of the query rows for each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from agentcache.engine.runtime import Runtime
from agentcache.engine.segments import Segment
from agentcache.errors import SelfCheckError
from agentcache.types import Run, clip_runs

__all__ = ["Oracle"]


class Oracle:
    """The rows of a full prefill beside the stale ones.

    Made when X stands in the pages among stale rows; leaves the pages as they were.

    Args:
        runtime: The rank's pages and segment forward.
        token_ids: Ids of rows `[0, load_end)`.
        blocks: int64 block table of the request.
        query: The prompt's last tokens.
        span: Rows from the first that is not that of a full prefill to `load_end`.
    """

    def __init__(
        self, runtime: Runtime, token_ids: Sequence[int], blocks: torch.Tensor, query: Sequence[int], span: Run
    ) -> None:
        self.runtime, self.blocks, self.span = runtime, blocks, span
        size = runtime.block_size
        end = len(token_ids)
        table = torch.cat([blocks[: -(-end // size)], torch.zeros(-(-len(query) // size), dtype=torch.int64)])
        self._asking = Segment([*token_ids, *query], table, end, end + len(query))
        self._stale = runtime.rows(blocks, *span)
        runtime.segments.run([Segment(token_ids, blocks, *span)])
        self._fresh = runtime.rows(blocks, *span)
        self._wanted = self._log_probs()
        self._write(self._stale, [span])

    def effects(self, rows: Sequence[Run], block: int) -> Iterator[tuple[Run, float]]:
        """Yields each block of rows with its causal effect, in nats.

        That is by how much its transplant brings the next token's distribution closer (KL) to that of the full prefill:
        CausalOracle of EditLocal (Selection policies), which ranks positions by their effect on the margin of two answers;
        **choice**: KL needs no answers, and blocks that are transplanted together keep the count of forwards small.

        Args:
            rows: Candidates, ascending.
            block: Tokens a block.
        """
        before = self._distance()
        for start, stop in rows:
            for at in range(start - start % block, stop, block):
                part = [*clip_runs([Run(at, at + block)], start, stop)]
                self._write(self._fresh, part)
                yield part[0], before - self._distance()
                self._write(self._stale, part)
        self.runtime.clear_null_block()

    def transplant(self, runs: Sequence[Run]) -> None:
        """Writes rows of the full prefill over stale ones."""
        self._write(self._fresh, runs)

    def _write(self, rows: torch.Tensor, runs: Sequence[Run]) -> None:
        for start, stop in runs:
            at = torch.arange(start, stop)
            size = self.runtime.block_size
            slots = (self.blocks[at // size] * size + at % size).to(self.runtime.device)
            for pages, layer in zip(
                self.runtime.pages, rows[:, :, start - self.span.start : stop - self.span.start], strict=True
            ):
                pages.write(slots, layer[0].contiguous(), layer[1].contiguous())

    @torch.inference_mode()
    def _log_probs(self) -> torch.Tensor:
        """Returns the log-probabilities of the token after the prompt, with the rows that stand in the pages, float64 `[vocabulary]`."""
        hidden = self.runtime.segments.forward([self._asking])
        logits = self.runtime.segments.model.compute_logits(hidden[len(self._asking) - 1 : len(self._asking)])
        if logits is None:
            raise SelfCheckError("an oracle needs the logits on every rank")
        return logits[0].double().log_softmax(-1)

    def _distance(self) -> float:
        """Returns the KL divergence of the next token's distribution from that of the full prefill, in nats."""
        got = self._log_probs()
        return float((self._wanted.exp() * (self._wanted - got)).sum())
