"""What the scheduler half remembers of one request from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass

from agentcache.engine.commits import Salts
from agentcache.engine.durable import Seek
from agentcache.engine.wire import Recovery, ResumeParams
from agentcache.recovery.base import RecoveryPlan
from agentcache.store.extents import LoadExtent
from agentcache.store.index import Version
from agentcache.types import Run

__all__ = ["Load", "RequestState"]


@dataclass(slots=True)
class Load:
    """The load of one request from vLLM's own hit on: what to copy and what to compute of rows `[start, load_end)`."""

    start: int
    extents: list[LoadExtent]
    recompute: tuple[Run, ...]
    background: bool = False


@dataclass(slots=True)
class RequestState:
    """What the half knows of one request that opted in.

    `plan` is None when nothing can be restored. `first_approximate` holds for the version whatever becomes of the plan,
    unless its approximate rows provably never came to be. `seek` is the search for its parent below memory, `sought_at` its
    beginning until its payloads are here.
    """

    params: ResumeParams | None
    recovery: Recovery
    plan: RecoveryPlan | None = None
    parent: Version | None = None
    seek: Seek | None = None
    sought_at: float | None = None
    salts: Salts = ()
    exact_end: int = 0
    first_approximate: int | None = None
    matched: int = 0
    load: Load | None = None
    loading: bool = False
    blocks: tuple[int, ...] = ()
    owns_key: bool = False
    save: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """`(namespace, version)`."""
        return (self.params.namespace, self.params.version) if self.params else ("", self.recovery.version)
