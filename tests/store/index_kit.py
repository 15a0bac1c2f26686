"""Saves into a checkpoint index that must be accepted or refused, and three prompts to save."""

from __future__ import annotations

from collections.abc import Sequence

from agentcache.store import CheckpointIndex, Refusal, SavePlan, Version
from agentcache.types import AlignedRun

__all__ = ["EDITED", "OLD", "RESTORED", "ROW", "TOKEN", "index", "refused", "save"]

ROW = 100
TOKEN = 4


def index(tokens: int = 100_000) -> CheckpointIndex:
    """Returns an index whose budget holds about so many tokens."""
    return CheckpointIndex(ROW, tokens * (ROW + TOKEN))


def save(
    at: CheckpointIndex,
    name: str,
    tokens: Sequence[int],
    *,
    parent: Version | None = None,
    restore: Sequence[AlignedRun] = (),
    computed: int | None = None,
    exact_end: int | None = None,
    group: str = "episode",
    namespace: str = "default",
    commit: bool = True,
) -> SavePlan:
    """Saves a version that must be accepted."""
    computed = len(tokens) if computed is None else computed
    made = at.begin_save(
        name,
        namespace,
        group,
        parent,
        tokens,
        computed,
        restore,
        computed if exact_end is None else exact_end,
    )
    assert isinstance(made, SavePlan), made
    if commit:
        assert at.commit(made.version)
    at.check_integrity()
    return made


def refused(at: CheckpointIndex, name: str, tokens: Sequence[int], **given: object) -> str:
    """Tries to save a version that must be refused, checks that nothing changed, and returns the reason."""
    at.take_dropped()
    before = state(at)
    defaults = {
        "namespace": "default",
        "group": "episode",
        "parent": None,
        "plan_restore": (),
        "exact_end": len(tokens),
    }
    made = at.begin_save(name, token_ids=tokens, computed=len(tokens), **(defaults | given))  # type: ignore[arg-type]
    assert isinstance(made, Refusal), made
    assert state(at) == before
    assert at.take_dropped() == ()
    at.check_integrity()
    return made.reason


def state(at: CheckpointIndex) -> object:
    """Returns everything that a refusal must not change: versions, order of eviction, counters."""
    order = [[(v.key, v.extents, v.state, v.pins) for v in group] for group in at._order.groups()]
    return order, {k: v for k, v in at.stats().items() if k != "refusals"}


OLD = list(range(1000))
EDITED = [*range(300), *range(5000, 5020), *range(310, 1000)]
RESTORED = (AlignedRun(0, 0, 300), AlignedRun(342, 352, 658))  # [300, 352) was recomputed
