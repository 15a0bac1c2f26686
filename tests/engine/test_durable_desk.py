"""How versions go down together, step by step, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from agentcache.engine.orders import Staged, StepReport
from agentcache.store.tiers import Manifest, Miss, Refused
from agentcache.store.tiers.memory import MemoryStore
from tests.engine.desk import FINGERPRINT, Desk
from tests.engine.harness import NEW, OLD, edit, text

DOWN = Refused("the server failed", "unavailable")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 30, fingerprint=FINGERPRINT)


@pytest.fixture
def desk(store: MemoryStore) -> Iterator[Desk]:
    desk = Desk(store)
    yield desk
    desk.drain()
    desk.check()
    store.check_integrity()
    assert store.stats()[0]["reserved_bytes"] == 0
    desk.close()


def save_lineage(desk: Desk) -> None:
    assert desk.serve(OLD, {"version": "v1"}).saved == "pending"
    newer = edit(NEW, 200, 2, [9])
    assert desk.serve(NEW, {"version": "v2", "parent": "v1", "policy": "edit_local"}).reused_tokens > 50
    assert desk.serve(newer, {"version": "v3", "parent": "v2", "policy": "edit_local"}).reused_tokens > 50


def assert_stored(store: MemoryStore, *versions: str) -> None:
    for version in versions:
        assert isinstance(store.find("default", version), Manifest), version


def test_a_lineage_that_is_offered_again_together_is_stored(desk, store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(store, "_prepare", lambda *_: DOWN)
        save_lineage(desk)
        desk.drain()
    desk.serve(text(60, seed=4), {"version": "other"})
    desk.drain()
    assert_stored(store, "other", "v1", "v2", "v3")


def test_a_child_that_ends_while_its_parent_goes_down_shares_its_rows(desk, store):
    save_lineage(desk)
    desk.drain()
    assert_stored(store, "v1", "v2", "v3")
    keys = [{e.key for e in store.find("default", name).objects} for name in ("v1", "v2", "v3")]
    assert keys[0] & keys[1]
    assert keys[1] & keys[2]


@pytest.mark.parametrize("times", [1, 2])
def test_a_version_whose_answer_was_lost_is_known_below_later(desk, store, monkeypatch, times):
    complete, left = store._complete, [DOWN] * times

    def lossy(ticket):
        made = complete(ticket)
        return left.pop() if left else made

    monkeypatch.setattr(store, "_complete", lossy)
    save_lineage(desk)
    desk.drain()
    for name in ("other", "last"):
        desk.serve(text(60, seed=4), {"version": name})
        desk.drain()
    assert_stored(store, "v1", "v2", "v3", "other", "last")
    assert not desk.half.tier._demotions.owed
    assert all(block.parts for block in desk.half.index._objects.values())


def test_a_store_that_raises_is_a_store_that_refuses(desk, store, monkeypatch):
    for name in ("holds", "prepare", "complete", "find", "stats"):
        with monkeypatch.context() as patch:
            patch.setattr(store, name, lambda *_: 1 / 0)
            desk.serve(text(60, seed=len(name)), {"version": f"during-{name}"})
            assert desk.serve(NEW, {"version": f"x-{name}", "parent": "nobody"}).reason is not None
            desk.drain()
        desk.serve(text(60, seed=4), {"version": f"after-{name}"})
        desk.drain()
        assert_stored(store, f"after-{name}")


def test_what_one_of_two_ranks_lost_is_dropped_when_both_are_done(store):
    with_two = Desk(store, ranks=2)
    with_two.serve(OLD, {"version": "v1"})
    with_two.drain()
    assert_stored(store, "v1")
    with_two.half.reset()
    with_two.step()
    request = with_two.request(NEW, {"version": "v2", "parent": "v1", "policy": "edit_local"})
    with_two.half.on_new_request(request)
    stages = []
    while not stages:
        orders = with_two.half.orders(0)
        stages = orders.stage
    (stage,) = stages
    lost = stage.objects[0][0]
    with_two.half.on_report(StepReport(staged={stage.number: Staged(1, frozenset({lost}))}))
    assert lost not in with_two.half.orders(0).drop, "the other rank may be fetching it"
    assert with_two.half.matched_tokens(request, 0) == (None, False)
    with_two.half.on_report(StepReport(staged={stage.number: Staged(1, frozenset())}))
    assert lost in with_two.half.orders(0).drop
    external, _ = with_two.half.matched_tokens(request, 0)
    assert external == 309
    with_two.half.request_finished(request, [])
    with_two.drain()
    with_two.check()
    with_two.close()


def test_relatives_are_stored_whole_in_a_store_that_came_back_empty(desk, store):
    save_lineage(desk)
    desk.drain()
    for version in ("v1", "v2", "v3"):
        assert store.delete("default", version) is True
    for name in ("a", "b", "c"):
        assert desk.serve(NEW, {"version": name, "parent": "v2", "policy": "edit_local"}).prefix_tokens > 50
    for name in ("other", "last"):
        desk.serve(text(60, seed=4), {"version": name})
        desk.drain()
    assert_stored(store, "a", "b", "c")


def test_a_version_that_no_manifest_can_describe_stays_in_memory(desk, store):
    """Rows may survive any number of edits; a manifest counts so far and no further."""
    desk.serve(OLD, {"version": "v1"})
    desk.drain()
    version = desk.half.index.lookup("default", "v1")
    version.extents = tuple(e._replace(generation=1 << 24) for e in version.extents)
    assert desk.serve(NEW, {"version": "v2", "parent": "v1", "policy": "edit_local"}).reused_tokens > 50
    desk.drain()
    assert isinstance(store.find("default", "v2"), Miss)
    assert desk.half.index.lookup("default", "v2").state == "committed"
    assert not desk.half.tier._demotions.owed
