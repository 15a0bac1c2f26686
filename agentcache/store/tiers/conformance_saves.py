"""Checks of one handle: saves, loads, sharing, tenants and the budget."""

from __future__ import annotations

from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.conformance_kit import (
    FINGERPRINT,
    Backend,
    Material,
    expect,
    found,
    refused,
    used_bytes,
)
from agentcache.store.tiers.manifest import Manifest, new_key
from agentcache.store.tiers.outcomes import Lost, Miss, Refused, Stored

__all__ = [
    "a_save_is_seen_as_a_whole_or_not_at_all",
    "a_version_reads_what_was_put",
    "another_engines_versions_are_refused_with_the_reason",
    "tenants_are_isolated_and_ids_may_be_anything",
    "the_budget_holds_and_the_least_recently_used_goes",
    "versions_share_objects_until_the_last_is_gone",
    "what_does_not_fit_a_save_is_refused",
]

ODD_IDS = ("../../etc/passwd", "/", ".", "a/b", "nul\0", "CON", "ü" * 200, "🦊", " ", "-rf", "{x}:*", "\n", "%00")


def a_version_reads_what_was_put(backend: Backend) -> None:
    """Several objects on several ranks, found and fetched by the same and by another handle."""
    material = Material()
    with backend.open(fingerprint=FINGERPRINT) as store:
        draft = material.draft("v1", ranks=2, new=(1, 4096, 70_000, 77, 3, 500), tag="k8v4")
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
        one, other = material.draft("bc", namespace="a"), material.draft("c", namespace="ab")
        material.must_save(store, one)
        expect(isinstance(store.find("ab", "c"), Miss), "two ids are told apart only by where one ends")
        material.must_save(store, other)
        material.check(store, found(store, "ab", "c"))
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
        found(store, "red", "v2")  # which takes nothing from its hint
        found(store, "red", "v3")
        for i in (4, 5):  # v0 and v3 go; v2 is the least recently used, but a resume is expected
            material.must_save(store, drafts[i])
        expect(_there(store, 8) == {2, 4, 5}, f"{_there(store, 8)} are left, not 2, 4, 5")
        for weight in (float("inf"), float("nan"), -1.0, 0.0):
            expect(store.hint("red", "v2", weight), "hint() does not tell what is here")
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
        heir = material.draft("heir", shared=parent.objects, new=(10,))
        refused(store.prepare(heir, 3 * each - heir.cost_bytes - 5000), "full")  # beside what it shares
        expect(_there(store, 8) == before, "a refused save evicted something")
        store.check_integrity()


def _there(store: KVStore, most: int) -> set[int]:
    listed = store.versions()
    assert not isinstance(listed, Refused), listed
    return {i for i in range(most) if f"v{i}" in {v.version for v in listed}}
