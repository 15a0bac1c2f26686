"""Random histories of a checkpoint store against a model that keeps every version in a plain dictionary. Needs hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentcache.store.tiers.base import HINT_USES, KVStore
from agentcache.store.tiers.conformance_kit import Backend, Material, expect, same_version
from agentcache.store.tiers.manifest import Manifest, ObjectEntry
from agentcache.store.tiers.outcomes import Lost, Miss, Refused

__all__ = ["check_histories"]

NAMESPACES = ("red", "blue")


@dataclass(eq=False)
class _Version:
    manifest: Manifest
    score: int


@dataclass(eq=False)
class _Save:
    ticket: str
    draft: Manifest
    reserve: int
    missing: list[str] = field(default_factory=list)


def check_histories(backend: Backend, examples: int = 40, steps: int = 30) -> None:
    """Runs histories on a back end that is emptied before each; raises what does not hold."""

    class Histories(_Histories):
        place = backend

    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )


class _Histories(RuleBasedStateMachine):
    """Saves in steps and whole, loads, hints, deletes and restarts in any order, on one handle or on either of two."""

    place: Backend

    @initialize(budget=st.sampled_from([20_000, 9_000, 100_000]))
    def start(self, budget: int) -> None:
        self.budget = budget
        self.material = Material()
        self.saves: list[_Save] = []
        self.versions: dict[tuple[str, str], _Version] = {}
        self.ever: list[Manifest] = []
        self.clock = 0
        self.handles: list[KVStore] = []
        self.open()
        listed = self.handles[0].versions()
        assert not isinstance(listed, Refused), listed
        for info in listed:
            expect(self.handles[0].delete(info.namespace, info.version) is True, "delete was refused")

    def open(self) -> None:
        first = self.place.open(budget_bytes=self.budget)
        self.handles = [first, self.place.open(budget_bytes=self.budget)] if first.shared else [first]

    def teardown(self) -> None:
        for handle in getattr(self, "handles", ()):
            handle.close()

    def handle(self, data: st.DataObject) -> KVStore:
        return self.handles[data.draw(st.integers(0, len(self.handles) - 1), label="handle")]

    # -- the naive model -----------------------------------------------------------------------------------------------

    def used(self, versions: list[_Version]) -> int:
        sizes = {e.key: e.size_bytes for version in versions for e in version.manifest.objects}
        sizes |= {e.key: e.size_bytes for save in self.saves for e in save.draft.objects if e.parts}
        own = sum(version.manifest.cost_bytes for version in versions)
        return own + sum(save.draft.cost_bytes + save.reserve for save in self.saves) + sum(sizes.values())

    def evict(self) -> bool:
        """Removes versions until all is in the budget, or nothing when that cannot be."""
        if self.used([]) > self.budget:
            return False
        while self.used([*self.versions.values()]) > self.budget:
            key = min(self.versions, key=lambda k: (self.versions[k].score, self.versions[k].manifest.sequence))
            del self.versions[key]
        return True

    def stored(self) -> set[str]:
        kept = {e.key for version in self.versions.values() for e in version.manifest.objects}
        return kept | {e.key for save in self.saves for e in save.draft.objects if e.parts}

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # -- saves ---------------------------------------------------------------------------------------------------------

    def prepare(self, data: st.DataObject) -> _Save | None:
        namespace = data.draw(st.sampled_from(NAMESPACES), label="namespace")
        version = str(data.draw(st.integers(0, 7), label="version"))
        new = data.draw(st.lists(st.integers(1, 3000), max_size=3), label="new")
        parents = [manifest for manifest in self.ever if manifest.namespace == namespace]
        shared: tuple[ObjectEntry, ...] = ()
        if data.draw(st.booleans(), label="has a parent") and parents:
            parent = parents[data.draw(st.integers(0, len(parents) - 1), label="parent")]
            shared = parent.objects[: data.draw(st.integers(0, len(parent.objects)), label="shared")]
        ranks = len(shared[0].parts) if shared else data.draw(st.integers(1, 2), label="ranks")
        draft = self.material.draft(version, namespace=namespace, new=new, shared=shared, ranks=ranks)
        reserve = self.material.reserve(draft)
        made = self.handle(data).prepare(draft, reserve)
        save = _Save(str(made), draft, reserve, [entry.key for entry in draft.new_objects])
        if self.place.predictable:
            kind = None
            if (namespace, version) in self.versions:
                kind = "exists"
            elif not {entry.key for entry in shared} <= self.stored():
                kind = "gone"
            else:
                self.saves.append(save)
                if not self.evict():
                    self.saves.remove(save)
                    kind = "full"
            expect(kind == (made.kind if isinstance(made, Refused) else None), f"{made}, and not {kind}")
        elif not isinstance(made, Refused):
            self.saves.append(save)
        return None if isinstance(made, Refused) else save

    def finish(self, data: st.DataObject, save: _Save) -> None:
        made = self.handle(data).complete(save.ticket)
        key = save.draft.namespace, save.draft.version
        if self.place.predictable:
            refused = bool(save.missing) or key in self.versions
            expect(isinstance(made, Refused) == refused, f"complete gives {made}")
        if not isinstance(made, Refused):
            expect(not save.missing, "complete with payloads missing")
            self.saves.remove(save)
            self.versions[key] = _Version(made, self.tick())
            self.ever.append(made)

    @rule(data=st.data())
    def save_whole(self, data: st.DataObject) -> None:
        save = self.prepare(data)
        if save is not None:
            handle = self.handle(data)  # a rank's payloads of one save come through one handle
            self.put_through(handle, save)
            self.finish(data, save)

    def put_through(self, handle: KVStore, save: _Save) -> None:
        for key in save.missing:
            for rank in range(save.draft.ranks):
                made = handle.put(save.ticket, key, rank, self.material.blobs[key, rank])
                expect(not isinstance(made, Refused), f"put was refused: {made}")
        save.missing = []

    @precondition(lambda self: len(self.saves) < 3)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.prepare(data)

    def pick(self, data: st.DataObject) -> _Save:
        return self.saves[data.draw(st.integers(0, len(self.saves) - 1), label="save")]

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def store_payloads(self, data: st.DataObject) -> None:
        self.put_through(self.handle(data), self.pick(data))

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.finish(data, self.pick(data))

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        save = self.pick(data)
        self.handle(data).abort(save.ticket)
        self.saves.remove(save)

    # -- everything else -----------------------------------------------------------------------------------------------

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), number=st.integers(0, 7))
    def find(self, data: st.DataObject, namespace: str, number: int) -> None:
        key = namespace, str(number)
        made, known = self.handle(data).find(*key), self.versions.get(key)
        assert not isinstance(made, Refused), made
        if isinstance(made, Miss):
            expect(known is None or not self.place.predictable, f"{key} is not found")
        else:
            expect(known is not None and same_version(made, known.manifest), f"{key} is {made}")
            assert known is not None
            known.score = max(known.score, self.tick())

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), number=st.integers(0, 7), uses=st.integers(0, 9))
    def hint(self, data: st.DataObject, namespace: str, number: int, uses: int) -> None:
        key = namespace, str(number)
        there = self.handle(data).hint(*key, uses / HINT_USES)
        expect(there == (key in self.versions) or not self.place.predictable, f"hint says {there} of {key}")
        if key in self.versions:
            self.versions[key].score = self.tick() + uses

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), number=st.integers(0, 7))
    def delete(self, data: st.DataObject, namespace: str, number: int) -> None:
        key = namespace, str(number)
        there = self.handle(data).delete(*key)
        expect(there == (key in self.versions) or not self.place.predictable, f"delete says {there} of {key}")
        self.versions.pop(key, None)

    @rule()
    def restart(self) -> None:
        durable = self.handles[0].durable
        for handle in self.handles:
            handle.flush()
            handle.close()
        self.open()
        self.saves = []
        if not durable:
            self.versions = {}

    @rule(data=st.data())
    def clear_away(self, data: st.DataObject) -> None:
        report = self.handle(data).gc()
        expect(not isinstance(report, Refused), f"gc was refused: {report}")
        assert not isinstance(report, Refused)
        expect((report.saves, report.manifests, report.payloads) == (0, 0, 0), f"there is nothing to clear: {report}")

    # -- what must always hold -----------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not self.handles:
            return
        for handle in self.handles:
            handle.flush()
            handle.check_integrity()
            listed = handle.versions()
            assert not isinstance(listed, Refused), listed
            names = [(info.namespace, info.version) for info in listed]
            if self.place.predictable:
                order = sorted(self.versions.values(), key=lambda version: version.manifest.sequence)
                expected = [(version.manifest.namespace, version.manifest.version) for version in order]
                expect(names == expected, f"versions are {names}, not {expected}")
                used = sum(stats["used_bytes"] for stats in handle.stats())
                expect(used == self.used([*self.versions.values()]), f"{used} bytes are used")
            else:
                expect(set(names) <= self.versions.keys(), f"{names} are more than {[*self.versions]}")
            for stats in handle.stats():
                expect(stats["used_bytes"] <= self.budget, "over budget")

    @invariant()
    def every_version_reads_what_was_put(self) -> None:
        for handle in self.handles[-1:]:
            kept = self.stored()
            for manifest in self.ever:
                for rank in range(manifest.ranks):
                    for key, blob in handle.fetch([e.key for e in manifest.objects], rank).items():
                        if isinstance(blob, Lost):
                            expect(key not in kept or not self.place.predictable, f"object {key} is lost: {blob}")
                        else:
                            whole = blob.tobytes() == self.material.blobs[key, rank].tobytes()
                            expect(whole, f"object {key} reads other bytes")
                            expect(key in kept or not self.place.predictable, f"object {key} should be gone")
