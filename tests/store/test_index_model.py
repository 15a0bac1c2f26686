"""The checkpoint index against a naive model and a worker that only follows orders, over random histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentcache.store import CheckpointIndex, Refusal, Version
from agentcache.types import AlignedRun

ROW = 10
NAMESPACES = ("red", "blue")
GROUPS = ("g1", "g2", "g3")

Cell = tuple[int, int]  # (the save that computed the row, its position there)


@dataclass(eq=False)
class Model:
    """One version, row by row."""

    namespace: str
    name: str
    group: str
    tokens: list[int]
    rows: list[Cell | None]
    generations: list[int]
    state: str = "saving"
    pins: int = 1
    handle: Version = field(default=None)  # type: ignore[assignment]


class Histories(RuleBasedStateMachine):
    """Saves, children, loads, evictions, losses and drops in any order."""

    @initialize(budget=st.sampled_from([6_000, 3_000, 20_000, 1_000]))
    def start(self, budget: int) -> None:
        self.budget = budget
        self.index = CheckpointIndex(ROW, self.budget)
        self.found: list[Model] = []  # by creation
        self.doomed: list[Model] = []
        self.lru: list[tuple[str, str]] = []
        self.worker: dict[int, list[tuple[int, Cell]]] = {}
        self.object_of: dict[Cell, int] = {}
        self.serial = 0

    # -- the naive model -----------------------------------------------------------------------------------------------

    def objects(self, models: list[Model]) -> set[int]:
        return {self.object_of[cell] for model in models for cell in model.rows if cell is not None}

    def payload(self, objects: set[int]) -> int:
        sizes = dict.fromkeys(objects, 0)
        for object_id in self.object_of.values():
            if object_id in sizes:
                sizes[object_id] += ROW
        return sum(sizes.values())

    def used(self, models: list[Model]) -> int:
        return self.payload(self.objects(models)) + sum(4 * len(model.tokens) for model in models)

    def victims(self, needed: int, lru: list[tuple[str, str]], parent: Model | None) -> list[Model] | None:
        """Returns who must go so that `needed` bytes fit, or None when they never will."""
        left, gone = list(self.found), []
        while self.used([*left, *self.doomed]) + needed > self.budget:
            free = [model for model in left if not model.pins and model is not parent]
            if not free:
                return None
            victim = min(free, key=lambda model: (lru.index((model.namespace, model.group)), self.found.index(model)))
            left.remove(victim)
            gone.append(victim)
        return gone

    def forget(self, model: Model) -> None:
        self.found.remove(model)
        model.state = "dropped"
        if model.pins:
            self.doomed.append(model)
        self.prune()

    def prune(self) -> None:
        alive = {(model.namespace, model.group) for model in self.found}
        self.lru = [group for group in self.lru if group in alive]

    def release(self, model: Model) -> None:
        model.pins -= 1
        if not model.pins and model in self.doomed:
            self.doomed.remove(model)

    def mostly(self, data: st.DataObject) -> bool:
        return data.draw(st.sampled_from([True, True, True, False]))

    def pick(self, data: st.DataObject, models: list[Model]) -> Model:
        return models[data.draw(st.integers(0, len(models) - 1), label="which")]

    # -- saves ---------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), namespace=st.sampled_from(NAMESPACES), group=st.sampled_from(GROUPS), name=st.integers(0, 19))
    def save_first(self, data: st.DataObject, namespace: str, group: str, name: int) -> None:
        self.save(data, namespace, group, str(name), None)

    @precondition(lambda self: self.committed())
    @rule(data=st.data(), group=st.sampled_from(GROUPS), name=st.integers(0, 19))
    def save_child(self, data: st.DataObject, group: str, name: int) -> None:
        parent = self.pick(data, self.committed())
        self.save(data, parent.namespace, parent.group if self.mostly(data) else group, str(name), parent)

    @precondition(lambda self: self.committed())
    @rule(data=st.data(), name=st.integers(0, 19))
    def save_next(self, data: st.DataObject, name: int) -> None:
        latest = self.committed()[-1]
        self.save(data, latest.namespace, latest.group, str(name), latest)

    def committed(self) -> list[Model]:
        return [model for model in self.found if model.state == "committed"]

    def save(self, data: st.DataObject, namespace: str, group: str, name: str, parent: Model | None) -> None:
        tokens, restore = self.edited(data, parent)
        computed = len(tokens) - data.draw(st.integers(0, min(9, len(tokens))), label="not computed")
        exact_end = data.draw(st.integers(0, len(tokens)), label="exact_end")
        before = self.index.stats()
        made = self.index.begin_save(
            name, namespace, group, parent and parent.handle, tokens, computed, restore, exact_end
        )

        self.serial += 1
        model = Model(namespace, name, group, tokens, [None] * len(tokens), [0] * len(tokens))
        fresh = self.fill(model, parent, computed, restore)
        taken = any((m.namespace, m.name) == (namespace, name) for m in self.found)
        own = (namespace, group)
        lru = [*(g for g in self.lru if g != own), own]
        gone = None if taken else self.victims(len(fresh) * ROW + 4 * len(tokens), lru, parent if restore else None)
        if gone is None:
            assert isinstance(made, Refusal)
            assert {**self.index.stats(), "refusals": 0} == {**before, "refusals": 0}
            return
        assert not isinstance(made, Refusal), made.reason
        was_used = self.objects([*self.found, *self.doomed])
        self.lru = lru
        for victim in gone:
            self.forget(victim)
        assert self.index.stats()["evictions"] == before["evictions"] + len(gone)
        assert [row for new in made.new for row in range(new.start, new.stop)] == fresh
        for object_id, start, stop in made.new:
            assert object_id not in self.worker
            assert not start < exact_end < stop
            self.worker[object_id] = [(tokens[row], (self.serial, row)) for row in range(start, stop)]
            self.object_of.update({(self.serial, row): object_id for row in range(start, stop)})
        assert set(made.evicted) == was_used - self.objects([*self.found, *self.doomed])
        model.handle = made.version
        assert made.version.exact_end == min(exact_end, computed)
        self.found.append(model)
        self.lru = lru
        self.prune()
        if self.mostly(data):
            self.commit(model)

    def edited(self, data: st.DataObject, parent: Model | None) -> tuple[list[int], list[AlignedRun]]:
        """Draws a new prompt made of spans of the parent, some of which are restored, and of new tokens."""
        tokens: list[int] = []
        restore: list[AlignedRun] = []
        for _ in range(data.draw(st.integers(1, 4), label="pieces")):
            if parent is not None and parent.tokens and self.mostly(data):
                start = data.draw(st.one_of(st.just(0), st.integers(0, len(parent.tokens) - 1)), label="from")
                length = data.draw(st.integers(1, len(parent.tokens) - start), label="length")
                if self.mostly(data):
                    restore.append(AlignedRun(start, len(tokens), length))
                tokens += parent.tokens[start : start + length]
            else:
                length = data.draw(st.sampled_from([1, 3, 20, 20, 40, 300]), label="new tokens")
                tokens += [(self.serial + i) % 3 for i in range(length)]
        return tokens, restore

    def fill(self, model: Model, parent: Model | None, computed: int, restore: list[AlignedRun]) -> list[int]:
        """Decides where each row of a new version comes from; returns those that are new."""
        edit = 0
        while (
            parent and edit < min(len(parent.tokens), len(model.tokens)) and parent.tokens[edit] == model.tokens[edit]
        ):
            edit += 1
        for run in restore:
            for i in range(run.length):
                old, new = run.old_start + i, run.new_start + i
                assert parent is not None
                if new < computed and parent.rows[old] is not None:
                    model.rows[new] = parent.rows[old]
                    model.generations[new] = parent.generations[old] + (not old == new < edit)
        fresh = [row for row in range(computed) if model.rows[row] is None]
        for row in fresh:
            model.rows[row] = (self.serial, row)
        return fresh

    @precondition(lambda self: any(m.state == "saving" for m in self.found))
    @rule(data=st.data())
    def end_save(self, data: st.DataObject) -> None:
        model = self.pick(data, [m for m in self.found if m.state == "saving"])
        if self.mostly(data):
            self.commit(model)
        else:
            self.index.abort_save(model.handle)
            self.forget(model)
            self.release(model)

    def commit(self, model: Model) -> None:
        assert self.index.commit(model.handle)
        model.state = "committed"
        self.release(model)

    # -- loads ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.found or self.doomed)
    @rule(data=st.data(), start_row=st.integers(0, 40))
    def load(self, data: st.DataObject, start_row: int) -> None:
        model = self.pick(data, [*self.found, *self.doomed])
        runs = []
        at = data.draw(st.integers(0, 9), label="at")
        for _ in range(data.draw(st.integers(0, 3), label="runs") if model.tokens else 0):
            old = data.draw(st.integers(0, len(model.tokens) - 1), label="old")
            length = data.draw(st.integers(1, len(model.tokens) - old), label="length")
            runs.append(AlignedRun(old, at, length))
            at += length + data.draw(st.integers(0, 9), label="gap")
        wanted = {run.new_start + i: run.old_start + i for run in runs for i in range(run.length)}
        wanted = {new: old for new, old in wanted.items() if new >= start_row and model.rows[old] is not None}
        loaded = {}
        for object_id, offset, length, position, shift in self.index.load_plan(model.handle, runs, start_row):
            for i, (token, cell) in enumerate(self.worker[object_id][offset : offset + length]):
                assert position + i not in loaded
                assert shift == position + i - cell[1]
                loaded[position + i] = (token, cell)
        assert loaded == {new: (model.tokens[old], model.rows[old]) for new, old in wanted.items()}

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        model = self.pick(data, self.found)
        self.index.pin(model.handle)
        model.pins += 1

    def unpinnable(self) -> list[Model]:
        """Versions with an open load; the pin of a save belongs to `end_save` unless it was dropped meanwhile."""
        return [*self.doomed, *(m for m in self.found if m.pins > (m.state == "saving"))]

    @precondition(lambda self: self.unpinnable())
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        model = self.pick(data, self.unpinnable())
        if model.handle.state == "dropped" and data.draw(st.booleans(), label="as the end of a save"):
            assert not self.index.commit(model.handle)
        else:
            self.index.unpin(model.handle)
        self.release(model)

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        model = self.pick(data, self.found)
        self.index.touch(model.handle)
        own = (model.namespace, model.group)
        self.lru = [*(g for g in self.lru if g != own), own]

    # -- drops and losses ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def drop_version(self, data: st.DataObject) -> None:
        model = self.pick(data, self.found)
        self.index.drop_version(model.handle)
        self.forget(model)

    @rule(data=st.data(), what=st.sampled_from([*GROUPS, None]))
    def drop_many(self, data: st.DataObject, what: str | None) -> None:
        if self.mostly(data):
            return
        if what is None:
            self.index.clear()
        else:
            self.index.drop_group("red", what)
        for model in [m for m in self.found if what is None or (m.namespace, m.group) == ("red", what)]:
            self.forget(model)

    @precondition(lambda self: self.worker)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.sampled_from(sorted(self.worker)), max_size=2), label="lost")
        affected = self.index.lose_objects(lost)
        touched = [m for m in [*self.found, *self.doomed] if self.objects([m]) & lost]
        assert affected == sorted((m.handle for m in touched if m in self.found), key=lambda version: version.key)
        for model in touched:
            for row, cell in enumerate(model.rows):
                if cell is not None and self.object_of[cell] in lost:
                    model.rows[row] = None
                    model.generations[row] = 0

    @rule()
    def follow_orders(self) -> None:
        dropped = self.index.take_dropped()
        assert len(set(dropped)) == len(dropped)
        for object_id in dropped:
            del self.worker[object_id]
        assert set(self.worker) == self.objects([*self.found, *self.doomed])

    # -- what must always hold -----------------------------------------------------------------------------------------

    def rows_of(self, version: Version) -> Iterator[tuple[int, Cell, int]]:
        for object_id, offset, length, position, generation in version.extents:
            for i in range(length):
                yield position + i, self.worker[object_id][offset + i][1], generation

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.index.check_integrity()
        for model in [*self.found, *self.doomed]:
            version = model.handle
            assert (version.state, version.pins) == (model.state, model.pins)
            expected = [
                (row, cell, generation)
                for row, (cell, generation) in enumerate(zip(model.rows, model.generations, strict=True))
                if cell is not None
            ]
            assert list(self.rows_of(version)) == expected
            missing = [row for run in version.missing() for row in range(*run)]
            assert missing == [row for row, cell in enumerate(model.rows) if cell is None]
        for namespace in NAMESPACES:
            for name in map(str, range(20)):
                model = next((m for m in self.found if (m.namespace, m.name) == (namespace, name)), None)
                assert self.index.lookup(namespace, name) is (model.handle if model else None)

    @invariant()
    def counts_every_byte(self) -> None:
        stats = self.index.stats()
        models = [*self.found, *self.doomed]
        assert stats["bytes"] + stats["token_bytes"] == self.used(models) <= self.budget
        assert stats["pinned_bytes"] == self.used([m for m in models if m.pins])
        assert stats["versions"] == len(self.found)
        assert stats["groups"] == len(self.lru)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
