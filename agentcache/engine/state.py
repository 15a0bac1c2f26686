"""What the scheduler half remembers of one request from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentcache.engine.commits import Salts
from agentcache.engine.planning import Planned
from agentcache.engine.sources import Search
from agentcache.engine.wire import Recovery, ResumeParams
from agentcache.recovery.base import RecoveryPlan
from agentcache.store.compose import Composition
from agentcache.store.extents import LoadExtent
from agentcache.store.index import Version
from agentcache.types import AlignedRun, Run, clip_runs, complement, merge_runs, run_tokens

if TYPE_CHECKING:
    from agentcache.engine.orders import LoadReport

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
    unless its approximate rows provably never came to be. `composition` is what the plan restores from, pinned until the
    request ends; `missed` says what else was asked for, `fault` what else went wrong. `searches` are those below memory, by
    name, `sought_at` their beginning until the payloads are here. `online` is set while the policy chooses further rows in the
    worker; `repaired` are those that it chose, and until the worker has told them all that it may choose. `owns_key`: it is
    served as the only request of its version; `owns_notes`: no other request has that version, also when it is refused.
    """

    params: ResumeParams | None
    recovery: Recovery
    plan: RecoveryPlan | None = None
    online: Planned | None = None
    repaired: tuple[Run, ...] = ()
    composition: Composition | None = None
    missed: str | None = None
    fault: str | None = None
    searches: dict[str, Search] = field(default_factory=dict)
    sought_at: float | None = None
    salts: Salts = ()
    exact_end: int = 0
    first_approximate: int | None = None
    matched: int = 0
    load: Load | None = None
    loading: bool = False
    blocks: tuple[int, ...] = ()
    owns_key: bool = False
    owns_notes: bool = False
    save: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """`(namespace, version)`."""
        return (self.params.namespace, self.params.version) if self.params else ("", self.recovery.version)

    @property
    def parent(self) -> Version | None:
        """The version that rows are restored from: the parent with the sources, as they are now."""
        return None if self.composition is None else self.composition.view()

    def say(self, reason: str | None) -> None:
        """Sets the report's reason, behind what is missing of parent and sources."""
        self.fault = reason
        self.recovery.reason = "; ".join(filter(None, (self.missed, reason))) or None

    def note_dropped(self) -> None:
        """Notes what was dropped since it was planned with; its rows are missing from the composition now."""
        assert self.composition is not None
        recovery = self.recovery
        for version in self.composition.versions:
            name = version.version_id
            said = (
                f"{'parent' if name == recovery.parent else 'source'} {name!r} was dropped before it could be restored"
            )
            if version.state == "dropped" and said not in (self.missed or ""):
                self.missed = "; ".join(filter(None, (self.missed, said)))
                self.say(self.fault)
                if name in recovery.sources:
                    recovery.sources.remove(name)
                    recovery.lost_sources.append(name)

    def note_plan(self, plan: RecoveryPlan) -> None:
        """Tells the report what the plan is."""
        recovery = self.recovery
        recovery.policy, recovery.exact = plan.policy, plan.exact
        recovery.prefix_tokens, recovery.fresh_tokens = plan.prefix_tokens, plan.fresh_tokens
        recovery.repair_tokens, recovery.reused_tokens = plan.repair_tokens, plan.reused_tokens
        recovery.new_tokens = recovery.prompt_tokens - plan.load_end
        recovery.suffix_tokens = plan.suffix_tokens
        recovery.count_reuse()
        recovery.planned_ratio = round(plan.planned_tokens / plan.suffix_tokens, 6) if plan.suffix_tokens else 0.0
        assert self.composition is not None
        used = self.composition.used_by(plan.restore, keep_base=False)
        recovery.sources = [v.version_id for v in used.versions if v.version_id != recovery.parent]
        recovery.source_tokens = self._source_tokens()

    def kept(self) -> tuple[AlignedRun, ...]:
        """Returns the parent's rows that were restored and not recomputed, ascending."""
        assert self.plan is not None
        return tuple(
            AlignedRun(start - run.shift, start, stop - start)
            for run in self.plan.restore
            for start, stop in complement(
                clip_runs(self.repaired, run.new_start, run.new_stop), run.new_stop, run.new_start
            )
        )

    def _source_tokens(self) -> int:
        """Returns how many rows of F are not the parent's."""
        assert self.composition is not None
        if self.composition.base.version_id != self.recovery.parent:
            return self.recovery.reused_tokens
        return sum(run.length for run in self.kept() if run.old_start >= self.composition.source_start)

    def await_choice(self, rows: tuple[Run, ...], start: int) -> None:
        """Counts rows that the worker may choose in a load from `start` on as chosen until it tells.

        A request may end in the step of its load, before that: its version then stores all of them rather than share stale ones.
        """
        self.repaired = merge_runs([*clip_runs(self.repaired, 0, start), *rows])

    def note_repaired(self, repaired: tuple[Run, ...], start: int) -> None:
        """Takes in what the worker chose in a load of rows from `start` on; what an earlier load chose before them stays."""
        assert self.plan is not None
        self.repaired = merge_runs([*clip_runs(self.repaired, 0, start), *repaired])
        tokens = run_tokens(self.repaired)
        self.recovery.repair_tokens = self.plan.repair_tokens + tokens
        self.recovery.reused_tokens = self.plan.reused_tokens - tokens
        self.recovery.source_tokens = self._source_tokens()

    def give_up(self, local: int) -> None:
        """Forgets the plan: vLLM computes the rows beyond its own `local` hit.

        They are exact unless that hit reaches the lineage's approximate blocks.
        """
        assert self.plan is not None
        self.plan = None
        if self.first_approximate is not None and local <= self.first_approximate:
            self.first_approximate = None
        recovery = self.recovery
        recovery.policy, recovery.exact = "prefix_cache", self.first_approximate is None
        recovery.fresh_tokens = recovery.repair_tokens = recovery.reused_tokens = recovery.source_tokens = 0
        recovery.sources = []
        recovery.count_reuse()
        recovery.prefix_tokens = local
        recovery.new_tokens = recovery.prompt_tokens - local

    def note_load(self, load: LoadReport) -> None:
        """Takes in what the workers did for this request."""
        self.loading = False
        recovery = self.recovery
        recovery.restored_tokens, recovery.restored_bytes = load.restored_tokens, load.restored_bytes
        recovery.recomputed_tokens = load.recomputed_tokens
        recovery.lost_tokens += load.lost_tokens
        recovery.restore_ms, recovery.recompute_ms = load.restore_ms, load.recompute_ms
        recovery.select_ms = load.select_ms
        if self.online is not None and self.load is not None and self.plan is not None:
            self.note_repaired(load.repaired, self.load.start)
        recovery.count_reuse()
        if load.fault is not None:
            self.say(load.fault)
        if recovery.lost_tokens:
            self.say(f"{recovery.lost_tokens} stored rows were lost or corrupt and were recomputed")
