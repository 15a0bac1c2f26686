"""The contract of a recovery policy: which aligned tokens to recompute, and what follows from that choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agentcache.types import AlignedRun, Boundary, PromptDiff, Run

__all__ = ["PolicyContext", "RecoveryPlan", "RecoveryPolicy"]


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
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    source: ClassVar[str]

    @abstractmethod
    def select(self, context: PolicyContext) -> Iterable[tuple[int, int]]:
        """Returns runs `[start, stop)` of new positions to recompute, the most important first: a budget cuts from the end.

        The planner clips them to the aligned suffix.
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
    digest: str = field(default="")
