"""Times the engine's steps in the scheduler's process, so that estimates stay current. No torch, no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from agentcache.engine.costs import CostModel

__all__ = ["StepClock"]


class StepClock:
    """Tells the cost model how long steps took, from their orders to their output: that holds on any device.

    Only for engines whose steps follow one another: where a step is scheduled while another one runs, neither can be told from
    the other.

    Args:
        costs: Learns.
        now: Seconds of a steady clock.
    """

    def __init__(self, costs: CostModel, now: Callable[[], float] = time.perf_counter) -> None:
        self.costs = costs
        self._now = now
        self._step: tuple[float, Sequence[tuple[int, int]], tuple[str, float] | None] | None = None

    def begin(self, runs: Sequence[tuple[int, int]], load: tuple[str, float] | None = None) -> None:
        """Notes that a step begins.

        Args:
            runs: Rows `[start, stop)` of each request that vLLM computes.
            load: Policy of its only load and the seconds that its parts were fitted to take; None: the step has no load.
        """
        self._step = (self._now(), runs, load)

    def skip(self) -> None:
        """Notes that a step begins which does what nobody can estimate."""
        self._step = None

    def end(self) -> None:
        """Takes in the step that began last, if it is one to learn from."""
        step, self._step = self._step, None
        if step is not None:
            started, runs, load = step
            self.costs.observe_step(runs, self._now() - started, load)
