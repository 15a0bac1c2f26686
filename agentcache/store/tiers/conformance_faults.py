"""Checks of what happens to a store: damage, restarts, failures, other handles, threads, and any history."""

from __future__ import annotations

import threading

import numpy as np

from agentcache.store.tiers.base import KVStore
from agentcache.store.tiers.conformance_kit import (
    Backend,
    Material,
    expect,
    found,
    refused,
    same_version,
    used_bytes,
)
from agentcache.store.tiers.manifest import Manifest
from agentcache.store.tiers.outcomes import Lost, Miss, Refused, Stored

__all__ = [
    "a_damaged_payload_is_lost_and_no_other",
    "a_durable_store_survives_a_restart",
    "any_history_agrees_with_a_naive_model",
    "failures_are_answers",
    "handles_share_one_save",
    "threads_may_do_anything_at_once",
]


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
            greedy = material.draft("greedy", ranks=2, new=(100,))
            ticket = scheduler.prepare(greedy, 150)  # each rank's share is in it, both are not
            assert isinstance(ticket, str), ticket
            key = greedy.objects[0].key
            expect(isinstance(left.put(ticket, key, 0, material.blobs[key, 0]), Stored), "put was refused")
            second = right.put(ticket, key, 1, material.blobs[key, 1])
            refused(second if isinstance(second, Refused) else scheduler.complete(ticket), "full")
            scheduler.abort(ticket)
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
