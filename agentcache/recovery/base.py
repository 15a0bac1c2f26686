"""The contract of a recovery policy: which aligned tokens to recompute, and what follows from that choice.

```
select(context)           in the scheduler, before the request is scheduled: the part of R that follows from lengths and stored scores
choose(context, signals)  in the worker, after the restore: the part that follows from what is measured on the stale rows
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agentcache.types import AlignedRun, Boundary, PromptDiff, Run

__all__ = ["OnlinePolicy", "PolicyContext", "RecoveryPlan", "RecoveryPolicy", "Signal", "Signals"]


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at.

    Attributes:
        diff: The aligned spans between the parent checkpoint and the new prompt.
        token_ids: The new prompt's ids.
        boundaries: Messages, tool results and documents of the new prompt, ascending.
        attention: float32 `[new_len]`: how much each aligned row was attended to when the parent was saved, over the largest of
            all rows but the first four (PatchKV, stored attention; formulas 10); 0 for rows that are not aligned. None when the
            parent's save did not measure it.
        generations: int32 `[new_len]`: how many edits before it each aligned row has survived without being recomputed; 0 for
            rows that are not aligned. None when it is not known.
    """

    diff: PromptDiff
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    boundaries: tuple[Boundary, ...] = ()
    attention: npt.NDArray[np.float32] | None = None
    generations: npt.NDArray[np.int32] | None = None


class RecoveryPolicy(ABC):
    """Chooses R, the aligned suffix tokens that are recomputed. A policy is one file, a frozen dataclass, pure.

    Attributes:
        name: The registered name.
        exact: Whether the output is that of a full prefill.
        source: The paper or system that the policy comes from.
        reads_attention: Whether it ranks by the attention that the parent's save measured.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    source: ClassVar[str]
    reads_attention: ClassVar[bool] = False

    @abstractmethod
    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns runs `[start, stop)` of new positions to recompute, the most important first: a budget cuts from the end.

        The planner clips them to the aligned suffix.
        """

    def planned_tokens(self, context: PolicyContext, selected: int) -> int:  # noqa: ARG002
        """Returns how many tokens of S the policy sets out to recompute: before they are rounded to blocks, if it does that.

        Args:
            context: What it was shown.
            selected: Tokens of S that it selected from that.
        """
        return selected


class Signal(StrEnum):
    """What an online policy may have measured on the stale rows; each costs time inside TTFT."""

    QUERY = "query"
    """Attention that the prompt's last rows pay to each row: one segment forward of at most 32 rows."""
    CHECK = "check"
    """Deviations of fresh from stale K/V at a check layer: the layers before it over X and S."""
    AGREEMENT = "agreement"
    """Agreement of rows that were just recomputed with what they replaced: free."""
    EFFECT = "effect"
    """How much each row matters, known from a full prefill: an oracle, for diagnostics."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What was measured, each float32 `[new_len]`, 0 for rows that were not measured; None where the policy asked for nothing.

    Attributes:
        done: bool `[new_len]`: rows of S that are recomputed already, or will be whatever is chosen now.
        query: Mean attention of the query's last rows on each row, over heads and a few layers.
        key_deviation: `‖fresh − stale‖ / ‖fresh‖` of keys at the check layer (AgentKVShift 1).
        value_deviation: The same of values.
        key_error: `‖fresh − stale‖²` of keys at the check layer (CacheBlend).
        value_error: The same of values.
        agreement: Mean over layers of the cosine of each recomputed row's value with the stale one; NaN for all others.
        effect: By how many nats the exact rows of each row's block bring the next token's distribution closer to the full
            prefill's.
    """

    done: npt.NDArray[np.bool_]
    query: npt.NDArray[np.float32] | None = None
    key_deviation: npt.NDArray[np.float32] | None = None
    value_deviation: npt.NDArray[np.float32] | None = None
    key_error: npt.NDArray[np.float32] | None = None
    value_error: npt.NDArray[np.float32] | None = None
    agreement: npt.NDArray[np.float32] | None = None
    effect: npt.NDArray[np.float32] | None = None


class OnlinePolicy(RecoveryPolicy):
    """A policy that also looks at the stale rows themselves, in the worker, once they are restored.

    Attributes:
        iterative: Whether `choose` is called again after its rows were recomputed, until it returns nothing new.
    """

    iterative: ClassVar[bool] = False

    @property
    @abstractmethod
    def signals(self) -> frozenset[Signal]:
        """What must be measured."""

    @property
    def check_layer(self) -> int:
        """The layer whose fresh and stale rows `Signal.CHECK` compares; layers before it are computed for all of S."""
        return 1

    @property
    def probe_share(self) -> float | None:
        """How rows that are not recomputed are shifted by the mean deviation of those that are (AgentKVShift), None: not at all.

        Of each aligned run's recomputed rows, as many as this share of its tokens estimate the mean, those that deviate most;
        needs `Signal.CHECK`.
        """
        return None

    def shift_weights(self, signals: Signals) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Returns by how much of the mean each row is shifted, for keys and for values; float32 `[new_len]` in 0 to 1.

        Args:
            signals: Those of the check layer.
        """
        assert signals.key_deviation is not None and signals.value_deviation is not None, (
            "a check layer was not asked for"
        )
        return np.minimum(signals.key_deviation, 1), np.minimum(signals.value_deviation, 1)

    @property
    def effect_block(self) -> int:
        """Tokens whose effect `Signal.EFFECT` measures together."""
        return 8

    @property
    def transplants(self) -> bool:
        """Whether chosen rows are copied from the full prefill instead of recomputed; needs `Signal.EFFECT`."""
        return False

    def planned_tokens(self, context: PolicyContext, selected: int) -> int:
        """Returns the tokens that it selected, and the most that it may choose."""
        return min(selected + self.most(context), sum(run.length for run in context.diff.suffix))

    @abstractmethod
    def most(self, context: PolicyContext) -> int:
        """Returns how many tokens `choose` takes at most, in all rounds: what the scheduler reckons with."""

    @abstractmethod
    def choose(self, context: PolicyContext, signals: Signals) -> Iterable[tuple[int, int]]:
        """Returns runs `[start, stop)` of new positions to recompute beside those of `select`, the most important first.

        They are clipped to the restored rows of S.
        """


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What the engine does for one resume. Rows are token positions of the new prompt.

    Attributes:
        policy: Name of the policy.
        exact: Whether every row that this plan yields is that of a full prefill.
        load_end: Rows `[0, load_end)` are restored or recomputed by us; vLLM computes the rest.
        restore: Parent rows that are reused, ascending in the new prompt.
        recompute: X and R below `load_end`, ascending, disjoint; together with `restore` they tile `[0, load_end)`.
        first_approximate: First row of `[0, load_end)` whose KV is not that of a full prefill, or None.
        prefix_tokens: |P| that is reused.
        fresh_tokens: |X| below `load_end`.
        repair_tokens: |R|.
        reused_tokens: |F|.
        suffix_tokens: |S|, also beyond `load_end`.
        planned_tokens: Tokens of S that the policy set out to recompute, see `RecoveryPolicy.planned_tokens`.
        digest: Names the plan: equal plans have equal digests.
    """

    policy: str
    exact: bool
    load_end: int = 0
    restore: tuple[AlignedRun, ...] = ()
    recompute: tuple[Run, ...] = ()
    first_approximate: int | None = None
    prefix_tokens: int = 0
    fresh_tokens: int = 0
    repair_tokens: int = 0
    reused_tokens: int = 0
    suffix_tokens: int = 0
    planned_tokens: int = 0
    digest: str = field(default="")
