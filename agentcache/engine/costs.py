"""How long a resume will take on this engine, by each way of doing it: what policy `auto` compares. No torch, no vLLM.

```
worker, once      timed forwards and restores (engine.timing) --Samples--> fit
every step        what vLLM computed, and the one load beside it      ----> observe_step
every fetch       rows that came up from the tier below               ----> observe_fetch
a request         estimate_exact | estimate_recovery                  ----> seconds to the first token, from when it is scheduled
```
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from agentcache.recovery.base import RecoveryPlan
from agentcache.store.extents import OBJECT_TOKENS
from agentcache.types import Run, clip_runs, run_tokens

__all__ = ["CostModel", "Drift", "Limits", "Sample", "Work", "non_negative_fit", "work_of"]

_SMALL_STEP = 64  # tokens: a step of fewer tells of the step itself, one of more of the model
_LOAD_SHARE = 0.25  # of a step's estimate: a smaller load cannot be told from the noise of what it shares the step with
_FETCH_S, _FETCH_ROW_S = 5e-3, 2e-5  # a plain disk, until fetches were seen


class Work(NamedTuple):
    """What a forward computes: `tokens` rows, whose queries read `pairs` rows in all, each its own included."""

    tokens: int
    pairs: int


def work_of(runs: Iterable[tuple[int, int]]) -> Work:
    """Returns the work of computing rows `[start, stop)` of each run behind the rows before it."""
    tokens = pairs = 0
    for start, stop in runs:
        tokens += stop - start
        pairs += (stop * (stop + 1) - start * (start + 1)) // 2
    return Work(tokens, pairs)


class Sample(NamedTuple):
    """One timed piece of work.

    Attributes:
        kind: `forward` or `restore`.
        rows: Rows that were computed or restored.
        other: Pairs of a forward (see `Work`), stored objects of a restore.
        seconds: How long it took.
    """

    kind: Literal["forward", "restore"]
    rows: int
    other: int
    seconds: float


class Limits(NamedTuple):
    """What one step and one batch of segments may hold.

    Attributes:
        step_tokens: Of a step of the engine, and of a batch of segments.
        slice_tokens: Recovered tokens and new ones that share a step; more of them are recovered in steps of their own.
        runs: Of a batch of segments.
    """

    step_tokens: int
    slice_tokens: int
    runs: int


def non_negative_fit(features: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the coefficients `[K]`, none negative, whose relative errors of `seconds` have the least squares.

    With the few features that we have every set of them is tried: the best one whose free fit is non-negative is the optimum.

    Args:
        features: `[N, K]`, not negative.
        seconds: `[N]`, positive.
    """
    scale = np.maximum(features.max(axis=0), 1e-300)
    rows = features / scale / seconds[:, None]
    count = features.shape[1]
    best, least = np.zeros(count), float(len(seconds))  # the error of all zeros
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            found = np.linalg.lstsq(rows[:, chosen], np.ones(len(seconds)), rcond=None)[0]
            error = float(np.square(rows[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(count), error
                best[list(chosen)] = found
    coefficients: npt.NDArray[np.float64] = best / scale
    return coefficients


@dataclass(slots=True)
class Drift:
    """How much longer things take than the fit says: a moving average of log ratios that no single report can move far.

    Attributes:
        rate: Weight of a report once there were a few; the first ones count more.
        clip: Most log units that a report may differ from the average.
        limit: Most log units of the average.
    """

    rate: float = 0.2
    clip: float = math.log(2)
    limit: float = math.log(100)
    log: float = 0.0
    seen: int = 0

    @property
    def ratio(self) -> float:
        """Actual over fitted seconds."""
        return math.exp(self.log)

    def observe(self, fitted: float, actual: float) -> None:
        """Takes in a report; one that is no positive number tells nothing."""
        if not (0 < fitted < math.inf and 0 < actual < math.inf):
            return
        self.seen += 1
        step = min(max(math.log(actual) - math.log(fitted) - self.log, -self.clip), self.clip)
        log = self.log + max(self.rate, 1 / (1 + self.seen)) * step
        self.log = min(max(log, -self.limit), self.limit)


@dataclass(slots=True)
class CostModel:
    """Seconds of what a resume is made of; every term is at least 0 and grows with the work.

    ```
    forward  = a·batches + b·tokens + d·pairs                  fitted at start-up
    segments = forward of the recomputed runs, in batches of at most `runs` runs and `step_tokens` tokens
    step     = overhead + drift · forward                      one for each `step_tokens` tokens that vLLM computes itself
    restore  = e + f·rows + g·objects                          fitted at start-up, at the engine's own precision
    load     = drift of the policy · (restore + segments)
    fetch    = drift · (5 ms + 20 µs·rows)                     only when the parent is below memory
    ```

    The drifts follow what steps, loads and fetches really took. `overhead` (sampling, the way between the processes) is the median
    of what the last steps of few tokens took beside their forward.

    Attributes:
        limits: What a step and a batch may hold.
        forward: a, b, d; None until the engine has told its timings.
        restore: e, f, g.
        steps: Drift of vLLM's own forwards.
        loads: Drift by policy: those that choose rows in the worker pay for it there.
        fetches: Drift of the tier.
    """

    limits: Limits
    forward: tuple[float, float, float] | None = None
    restore: tuple[float, float, float] = (0.0, 0.0, 0.0)
    steps: Drift = field(default_factory=Drift)
    loads: dict[str, Drift] = field(default_factory=dict)
    fetches: Drift = field(default_factory=lambda: Drift(rate=0.5, clip=math.log(100), limit=math.log(1e6)))
    _small: deque[float] = field(default_factory=lambda: deque(maxlen=31))

    @property
    def ready(self) -> bool:
        """Whether estimates can be made."""
        return self.forward is not None

    @property
    def overhead(self) -> float:
        """Seconds of a step beside its forward; 0 until steps of few tokens were seen."""
        return float(np.median(self._small)) if self._small else 0.0

    def fit(self, samples: Sequence[Sample]) -> None:
        """Fits forwards and restores; of a kind without a sample that a clock can have told, the fit stays as it is."""
        by_kind: dict[str, list[Sample]] = {"forward": [], "restore": []}
        for sample in samples:
            if 1e-9 < sample.seconds < 1e9:
                by_kind[sample.kind].append(sample)
        if by_kind["forward"]:
            self.forward = _fit(by_kind["forward"])
        if by_kind["restore"]:
            self.restore = _fit(by_kind["restore"])

    # -- the terms -----------------------------------------------------------------------------------------------------

    def forward_s(self, work: Work, batches: int = 1) -> float:
        """Returns the seconds of a model forward."""
        assert self.forward is not None
        a, b, d = self.forward
        return a * batches + b * work.tokens + d * work.pairs

    def segments_s(self, runs: Sequence[tuple[int, int]]) -> float:
        """Returns the seconds of computing runs by segment forwards; 0 without any."""
        work = work_of(runs)
        batches = max(-(-work.tokens // self.limits.step_tokens), -(-len(runs) // self.limits.runs))
        return self.forward_s(work, batches)

    def steps_s(self, start: int, stop: int) -> float:
        """Returns the seconds of vLLM's own steps over rows `[start, stop)`, and of the sampling of one token."""
        steps = max(-(-(stop - start) // self.limits.step_tokens), 1)
        return steps * self.overhead + self.steps.ratio * self.forward_s(work_of([(start, stop)]), steps)

    def restore_s(self, rows: int, objects: int) -> float:
        """Returns the seconds of restoring `rows` rows that `objects` stored objects hold."""
        if not rows:
            return 0.0
        e, f, g = self.restore
        return e + f * rows + g * objects

    def fetch_s(self, rows: int) -> float:
        """Returns the seconds until `rows` rows have come up from the tier below."""
        return self.fetches.ratio * (_FETCH_S + _FETCH_ROW_S * rows) if rows else 0.0

    def load_s(self, runs: Sequence[tuple[int, int]], rows: int, objects: int, online: int = 0) -> float:
        """Returns the seconds that a load was fitted to take: without the drift of its policy.

        Args:
            runs: Rows to compute, ascending.
            rows: Rows to restore.
            objects: Stored objects that hold them.
            online: Rows that the policy may choose in the worker; where is not known, they are counted behind the last run.
        """
        last = runs[-1][1] if runs else rows
        chosen = [Run(last, last + online)] if online else []
        return self.restore_s(rows, objects) + self.segments_s([*runs, *chosen])

    # -- whole resumes -------------------------------------------------------------------------------------------------

    def estimate_exact(self, new_len: int, local: int) -> float:
        """Returns the seconds to the first token when vLLM has the first `local` rows and computes all others.

        Args:
            new_len: Length of the prompt.
            local: Rows in vLLM's own prefix cache.
        """
        return self.steps_s(min(local, new_len - 1), new_len)

    def estimate_recovery(
        self, plan: RecoveryPlan, *, new_len: int, local: int, fetch_rows: int = 0, online: int = 0
    ) -> float:
        """Returns the seconds to the first token of a plan, exact or not.

        Args:
            plan: What is restored and what is computed.
            new_len: Length of the prompt.
            local: Rows in vLLM's own prefix cache.
            fetch_rows: Rows that must come up from the tier below first.
            online: Rows that the policy may choose in the worker, beside the plan.
        """
        start = min(local, new_len - 1 if plan.first_approximate is None else plan.first_approximate)
        load_end = max(plan.load_end, start)
        restored = ((run.new_start, run.new_stop) for run in plan.restore)
        copied = [stop - begin for begin, stop in clip_runs(restored, start, load_end)]
        computed = list(clip_runs(plan.recompute, start, load_end))
        objects = sum(-(-rows // OBJECT_TOKENS) for rows in copied)
        load = 0.0
        if plan.load_end > start:
            drift = self.loads.get(plan.policy, Drift())
            load = drift.ratio * self.load_s(computed, sum(copied), objects, online)
        ours, rest = run_tokens(computed) + online, new_len - load_end
        slices = -(-ours // self.limits.slice_tokens) if ours and ours + rest > self.limits.slice_tokens else 0
        return self.fetch_s(fetch_rows) + load + slices * self.overhead + self.steps_s(load_end, new_len)

    # -- what really happened ------------------------------------------------------------------------------------------

    def observe_step(
        self, works: Sequence[tuple[int, int]], seconds: float, load: tuple[str, float] | None = None
    ) -> None:
        """Takes in a step.

        Args:
            works: Rows `[start, stop)` of each request that vLLM computed.
            seconds: From the scheduler's orders to the step's output.
            load: Policy of the step's only load and its `load_s`; None when the step had no load.
        """
        if self.forward is None or not 0 < seconds < math.inf:
            return
        work = work_of(works)
        forward = self.forward_s(work)
        if load is not None:
            policy, fitted = load
            own = self.overhead + self.steps.ratio * forward
            if fitted > _LOAD_SHARE * (own + fitted):
                self.loads.setdefault(policy, Drift()).observe(fitted, max(seconds - own, fitted / 8))
                return
            seconds -= fitted
        if work.tokens > _SMALL_STEP:
            self.steps.observe(forward, max(seconds - self.overhead, forward / 8))
        else:
            self._small.append(max(seconds - self.steps.ratio * forward, 0.0))

    def observe_fetch(self, rows: int, seconds: float) -> None:
        """Takes in how long rows took to come up from the tier below."""
        self.fetches.observe(_FETCH_S + _FETCH_ROW_S * rows, seconds)


def _fit(samples: Sequence[Sample]) -> tuple[float, float, float]:
    features = np.array([(1, sample.rows, sample.other) for sample in samples], dtype=np.float64)
    a, b, c = non_negative_fit(features, np.array([sample.seconds for sample in samples]))
    return float(a), float(b), float(c)
