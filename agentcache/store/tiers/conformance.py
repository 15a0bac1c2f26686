"""The check that every checkpoint store must pass, shipped so that a new back end anywhere is tested by a few lines.

```python
class MyBackend(Backend):
    def open(self, budget_bytes=1 << 30, fingerprint=None):
        return MyStore(self.place, budget_bytes, fingerprint=fingerprint)

    def damage(self, store, key, rank):
        ...  # change one bit of that payload

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_my_store(check):
    check_store(MyBackend, [check])
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import closing

import numpy as np

from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.conformance_kit import (
    FINGERPRINT,
    Backend,
    Material,
    expect,
    found,
    refused,
    same_version,
    used_bytes,
)
from agentcache.store.tiers.manifest import Manifest, new_key
from agentcache.store.tiers.outcomes import Lost, Miss, Refused, Stored

__all__ = ["CHECKS", "Backend", "Check", "check_store"]

ODD_IDS = ("../../etc/passwd", "/", ".", "a/b", "nul\0", "CON", "ü" * 200, "🦊", " ", "-rf", "{x}:*", "\n", "%00")


# -- the checks --------------------------------------------------------------------------------------------------------


def a_version_reads_what_was_put(backend: Backend) -> None:
    """Several objects on several ranks, found and fetched by the same and by another handle."""
    material = Material()
    with backend.open(fingerprint=FINGERPRINT) as store:
        draft = material.draft("v1", ranks=2, new=(1, 4096, 70_000), tag="k8v4")
        sealed = material.must_save(store, draft)
        expect(all(len(entry.parts) == 2 for entry in sealed.objects), "a sealed object has a part a rank")
        manifest = found(store, "red", "v1")
        expect(manifest == sealed, "find gives another manifest than complete")
        expect(manifest.token_ids.tobytes() == draft.token_ids.tobytes(), "other token ids")
        same = {"objects", "sequence"}
        expect(manifest.model_dump(exclude=same) == draft.model_dump(exclude=same), "other contents")
        material.check(store, manifest)
        report = store.verify()
        expect(not isinstance(report, Refused) and report.faults == (), f"verify finds {report}")
        listed = store.versions()
        expect(not isinstance(listed, Refused) and [v.version for v in listed] == ["v1"], f"versions() gives {listed}")
        store.check_integrity()


def a_save_is_seen_as_a_whole_or_not_at_all(backend: Backend) -> None:
    """Before `complete`, after an abort, and when payloads are missing."""
    material = Material()
    with backend.open() as store:
        draft = material.draft("v1")
        ticket = store.prepare(draft, material.reserve(draft))
        assert isinstance(ticket, str), ticket
        expect(isinstance(store.find("red", "v1"), Miss), "found before anything was put")
        refused(store.complete(ticket), "invalid")
        first = draft.new_objects[0]
        blob = material.blobs[first.key, 0]
        expect(isinstance(store.put(ticket, first.key, 0, blob), Stored), "put was refused")
        refused(store.complete(ticket), "invalid")
        expect(isinstance(store.find("red", "v1"), Miss), "found before it was complete")
        expect(store.put(ticket, first.key, 0, blob) == store.put(ticket, first.key, 0, blob), "a repeated put differs")
        refused(store.put(ticket, first.key, 0, blob[::-1].copy()), "invalid")
        expect(material.put(store, ticket, draft) is None, "put was refused")
        expect(isinstance(store.find("red", "v1"), Miss), "found before it was complete")
        expect(isinstance(store.complete(ticket), Manifest), "complete was refused")
        material.check(store, found(store, "red", "v1"))
        refused(store.complete(ticket), "invalid")
        store.abort(ticket)
        material.check(store, found(store, "red", "v1"))
        before = used_bytes(store)

        other = material.draft("v2")
        ticket = store.prepare(other, material.reserve(other))
        assert isinstance(ticket, str), ticket
        expect(material.put(store, ticket, other) is None, "put was refused")
        store.abort(ticket)
        refused(store.complete(ticket), "invalid")
        expect(isinstance(store.find("red", "v2"), Miss), "found after an abort")
        expect(all(isinstance(b, Lost) for b in store.fetch([e.key for e in other.objects], 0).values()), "not aborted")
        expect(used_bytes(store) == before, "an aborted save leaves bytes")
        store.check_integrity()


def what_does_not_fit_a_save_is_refused(backend: Backend) -> None:
    """Unknown tickets, objects and ranks, more bytes than reserved, a version twice, keys twice."""
    material = Material()
    with backend.open() as store:
        draft = material.draft("v1", ranks=2)
        for stray in ("", "x", "../../x", "0" * 16 + "-" + "0" * 32, "memory-00"):
            refused(store.put(stray, new_key(), 0, b"x"), "invalid")
            refused(store.complete(stray), "invalid")
            store.abort(stray)
        ticket = store.prepare(draft, material.reserve(draft))
        assert isinstance(ticket, str), ticket
        key = draft.objects[0].key
        refused(store.put(ticket, new_key(), 0, b"x"), "invalid")
        refused(store.put(ticket, "../x", 0, b"x"), "invalid")
        refused(store.put(ticket, key, 2, b"x"), "invalid")
        refused(store.put(ticket, key, -1, b"x"), "invalid")
        refused(store.put(ticket, key, 0, b""), "invalid")
        refused(store.put(ticket, key, 0, bytes(material.reserve(draft) + 1)), "full")
        expect(material.put(store, ticket, draft) is None, "put was refused")
        expect(isinstance(store.complete(ticket), Manifest), "complete was refused")
        refused(store.prepare(draft, 100), "exists")
        refused(store.prepare(material.draft("v1"), 100), "exists")
        again = material.draft("v2", new=(10,))
        twice = again.with_objects([again.objects[0]._replace(key=key)])
        twice = twice.model_copy(update={"extents": tuple(e._replace(key=key) for e in twice.extents)})
        refused(store.prepare(twice, 100), "invalid")
        one, two = material.draft("v3"), material.draft("v3")
        tickets = [store.prepare(one, material.reserve(one)), store.prepare(two, material.reserve(two))]
        if isinstance(tickets[1], str):  # a store may refuse at once, or the one that comes later
            assert isinstance(tickets[0], str)
            expect(material.put(store, tickets[0], one) is None, "put was refused")
            expect(material.put(store, tickets[1], two) is None, "put was refused")
            expect(isinstance(store.complete(tickets[1]), Manifest), "complete was refused")
            refused(store.complete(tickets[0]), "exists")
            store.abort(tickets[0])
            material.check(store, found(store, "red", "v3"))
        store.check_integrity()


def another_engines_versions_are_refused_with_the_reason(backend: Backend) -> None:
    """Each entry of the fingerprint, when it is stored and when it is found."""
    material = Material()
    with backend.open(fingerprint=FINGERPRINT) as store:
        material.must_save(store, material.draft("v1"))
        for name in FINGERPRINT:
            draft = material.draft("v2", fingerprint=FINGERPRINT | {name: "another"})
            made = store.prepare(draft, 1000)
            refused(made, "foreign")
            expect(name in str(made) and "another" in str(made), f"the reason does not name {name}: {made}")
    if not store.durable:
        return
    for other in (FINGERPRINT | {"rotary": "another"}, {}, FINGERPRINT | {"more": "x"}):
        with backend.open(fingerprint=other) as store:
            refused(store.find("red", "v1"), "foreign")
    with backend.open(fingerprint=FINGERPRINT) as store:
        material.check(store, found(store, "red", "v1"))


def tenants_are_isolated_and_ids_may_be_anything(backend: Backend) -> None:
    """No id is a path or a pattern, and no namespace sees or touches another's."""
    material = Material()
    with backend.open() as store:
        saved = {(n, v): material.draft(v, namespace=n, new=(40,)) for n in ODD_IDS[:4] for v in ODD_IDS}
        for draft in saved.values():
            material.must_save(store, draft)
        for (namespace, version), draft in saved.items():
            manifest = found(store, namespace, version)
            expect([e.key for e in manifest.objects] == [e.key for e in draft.objects], "another tenant's version")
            material.check(store, manifest)
        for namespace in (*ODD_IDS[:4], "\ud800", "*"):
            listed = store.versions(namespace)
            expect(not isinstance(listed, Refused), "versions() is refused")
            assert not isinstance(listed, Refused)
            expect(
                [v.version for v in listed] == [v for n, v in saved if n == namespace], f"{namespace!r} lists {listed}"
            )
        for stranger in (("blue", "a/b"), ("/", "blue"), ("\ud800", "\udfff"), ("", ""), ("*", "*")):
            expect(isinstance(store.find(*stranger), Miss), f"{stranger} is found")
            expect(store.delete(*stranger) is False, f"{stranger} is deleted")
        theirs = found(store, "/", ".").objects
        refused(store.prepare(material.draft("v", namespace="blue", shared=theirs), 1000), "gone")
        store.check_integrity()


def versions_share_objects_until_the_last_is_gone(backend: Backend) -> None:
    """A child costs what is new in it, and outlives its parent."""
    material = Material()
    with backend.open() as store:
        first = material.must_save(store, material.draft("v1", new=(3000, 2000)))
        before = used_bytes(store)
        draft = material.draft("v2", shared=first.objects[:1], new=(500,))
        second = material.must_save(store, draft)
        tiers = len(store.stats())
        grown = used_bytes(store) - before
        expect(grown == tiers * (500 + second.cost_bytes), f"a child of 500 new bytes takes {grown}")
        expect(store.holds([e.key for e in first.objects]) == {e.key for e in first.objects}, "holds() is wrong")
        expect(store.delete("red", "v1") is True, "delete was refused")
        expect(store.delete("red", "v1") is False, "deleted twice")
        expect(isinstance(store.find("red", "v1"), Miss), "found after delete")
        material.check(store, found(store, "red", "v2"))
        gone = store.fetch([first.objects[1].key], 0)[first.objects[1].key]
        expect(isinstance(gone, Lost), "an object that nothing points at is still there")
        third = material.must_save(store, material.draft("v3", shared=second.objects, new=()))
        refused(store.prepare(material.draft("v4", shared=first.objects), 1000), "gone")
        forged = second.objects[0]._replace(parts=second.objects[1].parts)
        refused(store.prepare(material.draft("v5", shared=[forged]), 1000), "invalid")
        expect(store.delete("red", "v2") is True, "delete was refused")
        material.check(store, third)
        expect(store.delete("red", "v3") is True, "delete was refused")
        expect(used_bytes(store) == 0, "bytes are left when no version is")
        store.check_integrity()


def a_damaged_payload_is_lost_and_no_other(backend: Backend) -> None:
    """One changed bit: the checksum tells, and `verify` names it."""
    material = Material()
    with backend.open() as store:
        manifest = material.must_save(store, material.draft("v1", ranks=2, new=(300, 5000, 200)))
        store.flush()
        bad = manifest.objects[1].key
        backend.damage(store, bad, 1)
        got = store.fetch([entry.key for entry in manifest.objects], 1)
        expect(isinstance(got[bad], Lost), "a damaged payload was returned")
        expect(sum(isinstance(blob, Lost) for blob in got.values()) == 1, "intact payloads are lost too")
        expect(got[bad] == Lost("its checksum does not match", "corrupt"), f"the reason is {got[bad]}")
        expect(isinstance(store.fetch([bad], 0)[bad], np.ndarray), "the other rank's part is lost too")
        report = store.verify()
        expect(not isinstance(report, Refused) and any(bad in f for f in report.faults), f"verify finds {report}")
        expect(sum(stats["lost"].get("corrupt", 0) for stats in store.stats()) >= 1, "the loss is not counted")


def the_budget_holds_and_the_least_recently_used_goes(backend: Backend) -> None:
    """Whole versions, oldest use first; hints and open saves protect; what never fits is refused."""
    material = Material()
    drafts = [material.draft(f"v{i}", new=(10_000,)) for i in range(8)]
    each = drafts[0].cost_bytes + 10_000
    with backend.open(budget_bytes=0) as store:
        refused(store.prepare(drafts[0], 10_000), "full")
        refused(store.prepare(material.draft("w", new=()), 0), "full")
    with backend.open(budget_bytes=3 * each + 100) as store:
        for draft in drafts[:3]:
            material.must_save(store, draft)
        if not backend.predictable:
            for draft in drafts[3:]:
                store.flush()
                material.must_save(store, draft)
            store.flush()
            expect(all(stats["used_bytes"] <= stats["budget_bytes"] for stats in store.stats()), "over budget")
            store.check_integrity()
            return
        found(store, "red", "v0")
        material.must_save(store, drafts[3])  # v1 goes
        expect(_there(store, 8) == {0, 2, 3}, f"{_there(store, 8)} are left, not 0, 2, 3")
        expect(store.hint("red", "v2", 1.0) and not store.hint("red", "v1"), "hint() does not tell what is here")
        for i in (4, 5):  # v0 and v3 go; v2 is the least recently used, but a resume is expected
            material.must_save(store, drafts[i])
        expect(_there(store, 8) == {2, 4, 5}, f"{_there(store, 8)} are left, not 2, 4, 5")
        store.hint("red", "v2", 0.0)
        parent = found(store, "red", "v4")
        found(store, "red", "v5")
        child = material.draft("child", shared=parent.objects, new=(10,))
        ticket = store.prepare(child, 10)
        assert isinstance(ticket, str), ticket
        big = material.draft("big", new=(10_000,))
        material.must_save(store, big)
        expect(material.put(store, ticket, child) is None, "put was refused")
        expect(isinstance(store.complete(ticket), Manifest), "what an open save shares was evicted")
        material.check(store, found(store, "red", "child"))
        expect(all(stats["used_bytes"] <= stats["budget_bytes"] for stats in store.stats()), "over budget")
        evictions = sum(stats["evictions"] for stats in store.stats())
        expect(evictions >= 4, f"{evictions} evictions are counted")
        before = _there(store, 8)
        refused(store.prepare(material.draft("huge"), 10 * each), "full")
        expect(_there(store, 8) == before, "a refused save evicted something")
        store.check_integrity()


def _there(store: KVStore, most: int) -> set[int]:
    listed = store.versions()
    assert not isinstance(listed, Refused), listed
    return {i for i in range(most) if f"v{i}" in {v.version for v in listed}}


def a_durable_store_survives_a_restart(backend: Backend) -> None:
    """Everything completed is there for a new handle; an open save is not."""
    material = Material()
    with backend.open() as store:
        durable = store.durable
        first = material.must_save(store, material.draft("v1", ranks=2))
        second = material.must_save(store, material.draft("v2", ranks=2, shared=first.objects))
        cut = material.draft("cut")
        ticket = store.prepare(cut, material.reserve(cut))
        assert isinstance(ticket, str), ticket
        material.put(store, ticket, cut)
        store.flush()
    if not durable:
        return
    with backend.open() as store:
        for manifest in (first, second):
            again = found(store, "red", manifest.version)
            expect(same_version(again, manifest), "another manifest after the restart")
            material.check(store, again)
        refused(store.complete(ticket), "invalid")
        expect(isinstance(store.find("red", "cut"), Miss), "a save that was cut off is found")
        third = material.must_save(store, material.draft("v3", ranks=2, shared=found(store, "red", "v2").objects))
        listed = store.versions()
        expect(not isinstance(listed, Refused) and [v.version for v in listed] == ["v1", "v2", "v3"], f"{listed}")
        expect(store.delete("red", "v1") is True, "delete was refused")
        material.check(store, third)
        expect(sum(stats["reserved_bytes"] for stats in store.stats()) == 0, "a save that was cut off holds bytes")
        store.check_integrity()


def handles_share_one_save(backend: Backend) -> None:
    """The scheduler's handle prepares and completes, each rank's handle puts and fetches."""
    with backend.open() as scheduler:
        if not scheduler.shared:
            return
        material = Material()
        with backend.open() as left, backend.open() as right:
            parent: Manifest | None = None
            for at in range(3):
                draft = material.draft(f"v{at}", ranks=2, shared=parent.objects[1:] if parent else ())
                ticket = scheduler.prepare(draft, material.reserve(draft))
                assert isinstance(ticket, str), ticket
                for rank, handle in enumerate((left, right)):
                    refused(scheduler.complete(ticket), "invalid")
                    for entry in draft.new_objects:
                        done = handle.put(ticket, entry.key, rank, material.blobs[entry.key, rank])
                        expect(isinstance(done, Stored), f"put was refused: {done}")
                made = scheduler.complete(ticket)
                assert isinstance(made, Manifest), made
                parent = found(right, "red", f"v{at}")
                expect(parent == made, "another handle finds another manifest")
                material.check(left, parent)
            expect(left.delete("red", "v0") is True, "delete was refused")
            expect(isinstance(scheduler.find("red", "v0"), Miss), "deleted by another handle, and found")
            material.check(right, found(scheduler, "red", "v2"))
            for handle in (scheduler, left, right):
                handle.check_integrity()


def failures_are_answers(backend: Backend) -> None:
    """While writes fail, each step of a save is refused; nothing half-made is left, and all is well afterwards."""
    for number, failing in enumerate(backend.failures()):
        material = Material(number)
        with backend.open() as store:
            old = f"old{number}"
            material.must_save(store, material.draft(old))
            before = used_bytes(store)
            for stage in ("prepare", "put", "complete"):
                version = f"{stage}{number}"
                draft = material.draft(version)
                made: object = None
                ticket: str | Refused = Refused("not yet", "invalid")
                if stage == "prepare":
                    with failing():
                        made = ticket = store.prepare(draft, material.reserve(draft))
                else:
                    ticket = store.prepare(draft, material.reserve(draft))
                    assert isinstance(ticket, str), ticket
                    if stage == "put":
                        with failing():
                            made = material.put(store, ticket, draft)
                    else:
                        expect(material.put(store, ticket, draft) is None, "put was refused")
                        with failing():
                            made = store.complete(ticket)
                refused(made, "unavailable", "full")
                if isinstance(ticket, str):
                    with failing():
                        store.abort(ticket)
                    store.abort(ticket)
                expect(isinstance(store.find("red", version), Miss), f"a save that failed in {stage} is found")
                with failing():
                    store.find("red", old)
                    store.fetch([entry.key for entry in draft.objects], 0)
                    store.hint("red", old)
                    store.versions()
                    store.verify()
                    store.stats()
                    store.delete("red", "nobody")
                material.must_save(store, material.draft(version))
                expect(store.delete("red", version) is True, "delete was refused")
                material.check(store, found(store, "red", old))
            expect(used_bytes(store) == before, "failed saves leave bytes")
            store.check_integrity()


def threads_may_do_anything_at_once(backend: Backend) -> None:
    """Saves, loads, hints and deletes of shared and of own versions, with too little room for all."""
    faults: list[BaseException] = []
    probe = Material().draft("probe", new=(4000, 3000))
    with backend.open(budget_bytes=12 * (probe.cost_bytes + 7000)) as store:

        def work(number: int) -> None:
            try:
                _work(store, number)
            except BaseException as error:  # noqa: BLE001  it is raised in the test's own thread
                faults.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        store.flush()
        expect(all(stats["used_bytes"] <= stats["budget_bytes"] for stats in store.stats()), "over budget")
        expect(sum(stats["reserved_bytes"] for stats in store.stats()) == 0, "reservations are left")
        report = store.verify()
        expect(not isinstance(report, Refused) and report.faults == (), f"verify finds {report}")
        store.check_integrity()


def _work(store: KVStore, number: int) -> None:
    material = Material(number)
    parent: Manifest | None = None
    for step in range(12):
        shared = parent.objects[:1] if parent is not None and step % 3 else ()
        draft = material.draft(f"{number}-{step}", new=(4000, 3000), shared=shared)
        made = material.save(store, draft)
        if isinstance(made, Refused):
            expect(made.kind in ("gone", "full"), f"a save was refused: {made}")  # its parent was evicted
            parent = None
            continue
        parent = made
        again = store.find("red", draft.version)
        if isinstance(again, Manifest):
            material.check(store, again, evicted_ok=True)
        if step % 4 == 1:
            store.hint("red", draft.version, 0.01)
        if step % 5 == 4:
            store.delete("red", f"{number}-{step - 1}")
        store.versions("red")


def any_history_agrees_with_a_naive_model(backend: Backend) -> None:
    """Random histories over two handles and restarts; see `conformance_model`. Needs hypothesis."""
    from agentcache.store.tiers.conformance_model import check_histories

    check_histories(backend)


Check = Callable[[Backend], None]
CHECKS: tuple[Check, ...] = (
    a_version_reads_what_was_put,
    a_save_is_seen_as_a_whole_or_not_at_all,
    what_does_not_fit_a_save_is_refused,
    another_engines_versions_are_refused_with_the_reason,
    tenants_are_isolated_and_ids_may_be_anything,
    versions_share_objects_until_the_last_is_gone,
    a_damaged_payload_is_lost_and_no_other,
    the_budget_holds_and_the_least_recently_used_goes,
    a_durable_store_survives_a_restart,
    handles_share_one_save,
    failures_are_answers,
    threads_may_do_anything_at_once,
    any_history_agrees_with_a_naive_model,
)


def check_store(factory: Callable[[], Backend], checks: Iterable[Check] = CHECKS) -> None:
    """Runs the checks, each on a fresh back end.

    Args:
        factory: Makes a back end that holds nothing.
        checks: Some of `CHECKS`.

    Raises:
        AssertionError: Says what does not hold.
    """
    for check in checks:
        with closing(factory()) as backend:
            check(backend)
